"""What an archive serves in one process of a server's: it is opened, asked for each layer, preloaded, and reported.

Plugins derive from `Served` and say when each of this happens. Whatever goes wrong before a model runs is one line of
the log, and the server's own kernels serve, or it does not start, as its setting says. Knows no server; torch is
imported when a layer is decided.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import AotError, ArgumentError
from ..gemm.signature import Signature
from ..serve.library import Library
from ..serve.load import load
from . import hooks
from .log import own_name, words
from .metrics import Exporting
from .recording import Recording
from .settings import LAYERS, Settings

if TYPE_CHECKING:
    from .activations import Fused, Mlp

# Of a layer that is served: the library's number, and the weight's type. vLLM's class of weights hides attributes
# behind `__torch_function__`, which a trace need not go through.
PLAIN, _BIASED, _DTYPE = "_cute_aot_plain", "_cute_aot_biased", "_cute_aot_dtype"
_FUSED = "_cute_aot_fused"  # of one that computes its activation too
OVERLAP_SUFFIX = "_overlap"  # behind each of these three: what is promised
_APART = "_cute_aot_apart"  # of one that does not at these M: the overlap there, and what `gated.flat` gives


class RequiredError(AotError):
    """A server is not to start, as its setting requires what the archive does not do."""


class Server(NamedTuple):
    """A server as its plugin knows it: its name, as lines of the log have it, which in lower case is its package's; the
    releases that the plugin was compared with; and what its users call the place of the setting."""

    name: str
    releases: tuple[str, ...]
    place: str

    def check(self, settings: Settings) -> None:
        """Refuse a release that is not known, unless the settings allow it.

        Raises:
            ArgumentError: the server's version, without what a build adds to it, is none of `releases`.
        """
        found = str(importlib.import_module(self.name.lower()).__version__)
        if settings.strict and found.partition("+")[0] not in self.releases:
            raise ArgumentError(
                f"this plugin knows {self.name} {', '.join(self.releases)}, found {found}; to use it all the same, say "
                f"'strict': false in {self.place}"
            )


class Served:
    """What one process serves; `load` opens an archive, as `runtime.load` does."""

    def __init__(
        self, server: Server, log: logging.Logger, recording: Recording, load: Callable[..., Library] = load
    ) -> None:
        self._server, self._log, self._load = server, log, load
        self._recording, self._exporting = recording, Exporting(log)
        self.lib: Library | None = None  # of the model that was loaded last
        self._required = ""  # without which the server is not to start
        self._digest = ""  # of what it serves
        self._began_with: Library | None = None  # which a graph may call though `lib` was given up
        self._serving = False  # whether a layer of any model was taken
        # Layers and graphs of earlier models hold numbers of theirs, so libraries stay open as long as the process.
        self._opened: dict[str, Library] = {}
        self._sizes: list[int] = []  # numbers of tokens that the server captures graphs for
        self._ready: set[str] = set()  # signatures whose kernels are loaded
        # Of quantised layers those that the server computes, by kind and reason.
        self._quantised_left: Counter[tuple[str, str]] = Counter()
        # By layers that compute their MLPs' activations, of whatever engine.
        self._fused: weakref.WeakKeyDictionary[Any, Fused] = weakref.WeakKeyDictionary()
        self._decisions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by layer, or fp8 GEMM

    # --- it begins ---

    def _begin(
        self,
        required: str,
        settings_of: Callable[[], Settings | None],
        record: Callable[[str], None],
        serve: Callable[[Settings], Library],
        engine_and_rank: Callable[[], tuple[int, int]],
    ) -> None:
        """Begin anew with what the server says, whatever this process served before.

        `required` is what the setting of this name says. `settings_of` reads all of them, `record` begins to record in
        a folder, and `serve` puts the hooks in place and returns the library, which `_open` opens; each may raise, and
        then nothing is served. `engine_and_rank` tells the figures of this process from others'.

        Raises:
            RequiredError: as `refuse`.
        """
        self._recording.end()
        self._exporting.end()
        self._forget()
        self._required = required
        try:
            settings = settings_of()
            if settings is not None:
                self._server.check(settings)
                if settings.record:
                    record(settings.record)
                if settings.paths:
                    lib = serve(settings)
                    self.lib, self._began_with, self._digest = lib, lib, lib.digest
        except Exception as error:  # the server goes on with its own kernels, whatever it is
            self.refuse(error)
        self._exporting.begin(self.lib, engine_and_rank)

    def _forget(self) -> None:
        """Begin anew; what an earlier engine was given goes on as it is."""
        self.lib, self._began_with, self._digest, self._serving = None, None, "", False
        self._ready.clear()
        self._quantised_left.clear()
        self._decisions.clear()

    def _open(self, settings: Settings, workspaces: str) -> Library:
        """The library of these files; the one that this process already has of the same contents."""
        lib = self._load(
            settings.paths,
            on_miss="torch",
            on_slower="torch",
            capture_workspaces=workspaces,
            require_signed=settings.require_signed,
        )
        known = self._opened.setdefault(f"{lib.digest} {workspaces} {settings.require_signed}", lib)
        if known is not lib:
            lib.close()
        return known

    def _number(self) -> int:
        """The number by which operators know the library."""
        from ..torch.operator import register

        assert self.lib is not None
        # Not `Library.identity`: a graph may come from the cache of a process on another device. Nor is it the digest
        # alone, or a number would follow from which of the libraries of one file a process opened first.
        (opened,) = (key for key, lib in self._opened.items() if lib is self.lib)
        return register(self.lib, identity=f"{self._server.name.lower()} {opened}")

    # --- its model is loaded ---

    def ask(self, signature: Signature) -> str:
        """Why the archive does not compute a scaled product, empty if it does; loads its kernels."""
        assert self.lib is not None
        from ..torch.layers import choose

        found, reason = choose(self.lib, signature)
        if found is not None and found.key() not in self._ready:
            self._preload({found.key()})  # now, as later there is no way back
            self._ready.add(found.key())
        return reason

    def unquantised(self, signature: Signature, gates: bool = False) -> Any:
        """`linears.unquantised` of a product of quantised tokens that the archive computes; loads its kernels. Where
        that fails the server is to quantise."""
        assert self.lib is not None
        from .linears import unquantised

        try:
            way, besides = unquantised(self.lib, signature, gates)
            for key, least, most in besides:
                if key not in self._ready:
                    self._preload({key}, tokens=(least, most))
                    self._ready.add(key)
        except AotError as error:
            self._log.warning("%s has %s quantise tokens: %s", own_name(self.lib), self._server.name, words(error))
            return None, ()
        return way, besides

    def decide(self, method: Any, layer: Any) -> None:
        """Let the archive compute a layer whose weight is in place, if it has a checked kernel for it; with its MLP's
        activation, if it did that before weights were loaded again."""
        fused = self._leave(layer)
        if self.lib is None:
            return
        try:
            from .linears import Decision, decide

            if len(layer.weight.shape) > 2:  # a convolution's, whose method servers set, and never call
                return
            if hooks.is_hooked(type(method), "apply"):
                decision = decide(self.lib, layer)
            else:
                decision = Decision("linear layer", reason=f"{type(method).__name__} has an apply of its own")
            self._take(layer, decision)
            if fused is not None and (mlp := fused.mlp()) is not None:
                self._fuse_one(mlp)
        except Exception as error:  # a layer, or a device, that is not as it is known
            self._give_up(error)

    def _take(self, layer: Any, decision: Any) -> None:
        """Let a layer be called as was decided."""
        from .linears import overlap_of

        number = self._number()
        for name, key in ((PLAIN, decision.plain), (_BIASED, decision.biased)):
            if key:
                setattr(layer, name, number)
                setattr(layer, name + OVERLAP_SUFFIX, overlap_of(key))
                setattr(layer, _DTYPE, layer.weight.dtype)
        self._decisions[layer] = decision

    def report(self, layers: Iterable[Any] | None = None) -> None:
        """Load and plan the kernels of the layers that were taken, of these or of all, and say which these are.

        Called before the server measures memory and captures graphs; raises where kernels cannot be loaded.

        Raises:
            RequiredError: the setting has the server not start where no layer of any model so far, or not every layer
                of these, is served.
        """
        from .linears import ACTIVATION, NORM, Decision, called, summary

        assert self.lib is not None
        decisions = [self._decisions[layer] for layer in (self._decisions if layers is None else layers)]
        decisions += [Decision(kind, reason=reason) for kind, reason in self._quantised_left.elements()]
        keys = {key for each in decisions for key in each.keys}
        by_rows: defaultdict[int, set[str]] = defaultdict(set)
        for each in decisions:
            for rows, of in each.keys_by_rows().items():
                by_rows[rows] |= of
        planned = min((self._preload(of, rows) for rows, of in by_rows.items() if of), default=0)
        for key, least, most in {besides for each in decisions for besides in each.besides}:
            self._preload({key}, tokens=(least, most))
            keys.add(key)
        what = f"{len(keys)} signatures preloaded, for {planned} numbers of tokens planned"
        found = f"{own_name(self.lib)} {summary(decisions, self._server.name)} ({what})"
        self._log.info("%s", found)
        products = [each for each in called(decisions) if each.kind not in (NORM, ACTIVATION)]
        self._serving |= any(each.asked for each in products)
        left = self._required == LAYERS and any(each.reason for each in products)
        if left or (self._required and not self._serving):
            raise RequiredError(
                f"{found}; 'required' is '{self._required}', so {self._server.name} does not start: build an archive "
                "of this model's layers on such a GPU (aot manifest from-config, aot build), or leave out 'required'"
            )

    def _fuse(self, model: Any, silu_and_mul: type, besides: frozenset[str] = frozenset()) -> None:
        """Let layers of gates compute their activations, where the archive has kernels for both together.

        The parameters are those of `activations.mlps`.
        """
        from .activations import mlps

        for mlp in mlps(model, silu_and_mul, besides):
            self._fuse_one(mlp)

    def _fuse_one(self, mlp: Mlp) -> None:
        """The same of one MLP, whose layer was decided about."""
        from . import gated
        from .activations import EPILOGUE, Fused
        from .linears import fused, overlap_of

        assert self.lib is not None
        layer, decision = mlp.gate_up, self._decisions.get(mlp.gate_up)
        if decision is None or not hooks.is_hooked(type(layer.quant_method), "apply"):
            return
        decision = fused(self.lib, layer, decision, EPILOGUE)
        if decision.fused:
            setattr(layer, _FUSED, self._number())
            setattr(layer, _FUSED + OVERLAP_SUFFIX, overlap_of(decision.fused))
            setattr(layer, _DTYPE, layer.weight.dtype)
            if decision.apart:
                setattr(layer, _APART, (overlap_of(decision.plain), gated.flat(decision.apart)))
                gated.use(self._number(), mlp.kernel)
            self._decisions[layer], self._fused[layer] = decision, Fused.of(mlp)
            mlp.leave_to_gemm()

    def _preload(self, keys: set[str], rows: int = 1, tokens: tuple[int, int | None] = (1, None)) -> int:
        """Load the kernels of these signatures, which see so many rows for each token, and plan for as many numbers of
        tokens as plans are kept, of those from the first to the last of `tokens`; where `rows` is 0 plan nothing."""
        assert self.lib is not None
        least, most = tokens
        sizes = [m * rows for m in self._sizes if rows and least <= m and (most is None or m <= most)]
        try:
            self.lib.preload(sizes, only=keys)
        except ArgumentError:  # too many plans: the least numbers of tokens are those of most graphs
            self.lib.preload(only=keys)
            return 0
        return len(self._sizes) if rows else 0

    # --- it runs ---

    def around_apply(self, computed: Callable[..., Any]) -> Callable[..., Any]:
        """Of the `apply` of 16-bit layers: what torch.compile traces, so no more than attributes, and the operator."""
        from ..torch.operator import GEMM  # the server has imported torch by now
        from .activations import EPILOGUE, swiglu
        from .gated import GATED

        def apply(method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
            number = getattr(layer, _FUSED, None)
            if number is not None:
                if x.dim() < 2 or x.dtype != getattr(layer, _DTYPE):
                    return swiglu(computed(method, layer, x, bias))
                overlap, apart = getattr(layer, _FUSED + OVERLAP_SUFFIX), getattr(layer, _APART, None)
                if apart is not None:
                    return GATED(number, x.contiguous(), layer.weight, EPILOGUE, overlap, *apart)
                return GEMM(number, x.contiguous(), layer.weight, epilogue=EPILOGUE, overlap=overlap)
            way = PLAIN if bias is None else _BIASED
            number = getattr(layer, way, None)
            if number is None or x.dim() < 2 or x.dtype != getattr(layer, _DTYPE):
                return computed(method, layer, x, bias)
            return GEMM(number, x.contiguous(), layer.weight, bias=bias, overlap=getattr(layer, way + OVERLAP_SUFFIX))

        return apply

    # --- it does not ---

    def _give_up(self, error: Exception) -> None:
        """Let the server compute every layer that it still can: nothing was traced yet."""
        self.lib = None
        for layer, decision in list(self._decisions.items()):
            if not decision.binding:  # or its kernels are loaded
                self._leave(layer)
        self.refuse(error)

    def _leave(self, layer: Any) -> Fused | None:
        """Let the server compute a layer, and its MLP the activation, if the layer did: then which that is."""
        fused = self._fused.pop(layer, None)
        if fused is not None and (mlp := fused.mlp()) is not None:
            mlp.restore()
        ways = [way + of for way in (PLAIN, _BIASED, _FUSED) for of in ("", OVERLAP_SUFFIX)]
        for name in (*ways, _DTYPE, _APART):
            if name in vars(layer):
                delattr(layer, name)
        self._decisions.pop(layer, None)
        return fused

    def refuse(self, error: Exception) -> None:
        """Say in one line why nothing is served.

        Raises:
            RequiredError: the setting has the server not start then.
        """
        if isinstance(error, RequiredError):
            raise error
        if self._required:
            what = f"'required' is '{self._required}', so {self._server.name} does not start"
            raise RequiredError(f"{own_name()} serves nothing: {words(error)}; {what}") from error
        self._log.warning("%s serves nothing, %s's kernels do: %s", own_name(), self._server.name, words(error))
        if not isinstance(error, AotError):
            self._log.debug("cute-aot", exc_info=error)
