"""What `runtime.load` may be told about how to serve, and whether such words go together."""

from __future__ import annotations

from ..errors import ArgumentError
from ..named_tuple import NamedTuple

ON_MISS = ("error", "torch")
REQUIRE = (None, "tuned")
ON_SLOWER = ("never", "torch")
ON_DAMAGE = ("error", "torch")
CAPTURE_WORKSPACES = ("own", "shared")


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
        on_miss, require, on_slower, batch_invariant, capture_workspaces, on_damage = self
        if on_miss not in ON_MISS:
            raise ArgumentError(f"on_miss must be one of {ON_MISS}, found {on_miss!r}")
        if require not in REQUIRE:
            raise ArgumentError(f"require must be one of {REQUIRE}, found {require!r}")
        if on_slower not in ON_SLOWER:
            raise ArgumentError(f"on_slower must be one of {ON_SLOWER}, found {on_slower!r}")
        if on_damage not in ON_DAMAGE:
            raise ArgumentError(f"on_damage must be one of {ON_DAMAGE}, found {on_damage!r:.80}")
        if type(batch_invariant) is not bool:
            raise ArgumentError(f"batch_invariant must be True or False, found {batch_invariant!r:.80}")
        if capture_workspaces not in CAPTURE_WORKSPACES:
            raise ArgumentError(
                f"capture_workspaces must be one of {CAPTURE_WORKSPACES}, found {capture_workspaces!r:.80}"
            )
        for name, word in (("on_miss", on_miss), ("on_slower", on_slower), ("on_damage", on_damage)):
            if batch_invariant and word == "torch":
                what = "would promise equal bits at every M of kernels that torch chooses by M"
                raise ArgumentError(f"batch_invariant=True with {name}='torch' {what}; give one of them")
        return self
