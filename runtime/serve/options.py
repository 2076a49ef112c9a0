"""What `runtime.load` may be told about how to serve, and whether such words go together."""

from __future__ import annotations

from ..errors import ArgumentError
from ..named_tuple import NamedTuple

_WORDS = {
    "on_miss": ("error", "torch"),
    "require": (None, "tuned"),
    "on_slower": ("never", "torch"),
    "capture_workspaces": ("own", "shared"),
    "on_damage": ("error", "torch"),
}


class Options(NamedTuple):
    """The words of one library; `runtime.load` says what they mean."""

    on_miss: str = "error"
    require: str | None = None
    on_slower: str = "never"
    batch_invariant: bool = False
    capture_workspaces: str = "own"
    on_damage: str = "error"

    def check(self) -> Options:
        """These, if each is known and they go together.

        Raises:
            ArgumentError: they are not.
        """
        if type(self.batch_invariant) is not bool:
            raise ArgumentError(f"batch_invariant must be True or False, found {self.batch_invariant!r:.80}")
        for name, words in _WORDS.items():
            found = getattr(self, name)
            if found not in words:
                raise ArgumentError(f"{name} must be one of {words}, found {found!r:.80}")
            if self.batch_invariant and found == "torch":
                what = "would promise equal bits at every M of kernels that torch chooses by M"
                raise ArgumentError(f"batch_invariant=True with {name}='torch' {what}; give one of them")
        return self


USUAL = Options()
