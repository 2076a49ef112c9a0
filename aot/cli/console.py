"""How the objects of `aot.cli.describe` are printed for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..verify.archive import Finding

from runtime.device.gpus import Gpu
from runtime.gemm.universal import PREDICTED

from ..search.operation import building
from ..version import UNKNOWN
from .streams import printable, say


def resources_line(name: str, launches: Iterable[dict[str, Any]]) -> str:
    """A kernel's name and what `aot.cli.describe.resources` says of it."""
    said = [
        f"{_extents([r['threads']])} threads, {r['registers']} registers, "
        f"{_extents([r['shared_bytes']])} bytes of shared memory, {r['local_bytes']} spilled"
        for r in launches
    ]
    return f"{name}: {'; '.join(said)}"


def _cleaned(obj: Any) -> Any:
    """A JSON object with every text of it as `printable` has it."""
    if isinstance(obj, str):
        return printable(obj)
    if isinstance(obj, list):
        return [_cleaned(item) for item in obj]
    if isinstance(obj, dict):
        return {_cleaned(name): _cleaned(item) for name, item in obj.items()}
    return obj


def print_listing(found: dict[str, Any]) -> None:
    """What `aot ls` prints."""
    found = _cleaned(found)
    for of in dict.fromkeys(entry["operation"] for entry in found["entries"]):
        rows = [row for entry in found["entries"] if entry["operation"] == of for row in _entry(entry)]
        header = ["signature", _names_of(of), "target", "gpu", "state", "torch faster", "M", "us", "ratio", "function"]
        _print_table(header, rows, right={6, 7, 8})
        print()
    if unused := sum(entry["instead"] is not None for entry in found["entries"]):
        what = "`aot show` with --m says what serves in their place, and `aot tune` makes them serve"
        print(f"{unused} of {len(found['entries'])} entries were never tuned and give way: {what}\n")
    if found["forms"]:
        header = ["any N and K", "target", "functions", "multiples of N, K", "checked on"]
        _print_table(header, [_form(form) for form in found["forms"]], right={2})
        print()
    if found["functions"]:
        rows = [[f["target"], f["name"], ", ".join(f["checked_on"])] for f in found["functions"]]
        _print_table(["target", "other function", "found right on"], rows)
        print()
    totals = found["totals"]
    if totals["functions"]:
        print(_built_by(found["tools"]))
    for environment in found["tuning"]:
        print(_environment(environment))
    if totals["measured"]:
        print(f"torch was faster at {_faster_with_torch(totals)} M values that were measured")
    each = f", {totals['bytes_per_function']:,} a function" if totals["functions"] else ""
    print(
        f"{totals['functions']} functions for {', '.join(totals['targets']) or 'no target'}: "
        f"{totals['raw_bytes']:,} bytes raw, {totals['file_bytes']:,} in the file{each}"
    )


def _entry(entry: dict[str, Any]) -> list[list[str]]:
    """The rows of an entry: one for each range, or one that says what it gives way to."""
    named = [entry["signature"], ",".join(entry["names"]), entry["target"], _kind(entry["gpu"])]
    if entry["instead"] is not None:
        return [[*named, f"{entry['state']}, unused", "", "1-", "", "", f"gives way to {_instead(entry['instead'])}"]]
    return [
        [
            *named,
            entry["state"],
            _faster_with_torch(entry) if row is entry["ranges"][0] else "",
            _interval(row),
            "" if row["us"] is None else f"{row['us']:.1f}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}x",
            row["function"],
        ]
        for row in entry["ranges"]
    ]


def _names_of(operation: str) -> str:
    """What manifests' names of an operation's problems are of, in a word."""
    return printable(building(operation).plural)


def _instead(instead: dict[str, Any]) -> str:
    """What an entry that serves nothing gives way to."""
    return "the entries that were tuned" if instead["form"] is None else f"what {instead['form']} predicts"


def print_entry(entry: dict[str, Any]) -> None:
    """What `aot show` prints for an entry of an operation's table, or for what serves of it at some M."""
    entry = _cleaned(entry)
    kind = f", {_kind(entry['gpu'])}" if entry["gpu"] else ""
    print(f"{entry['key']} on {entry['target']}{kind}: {entry['state']}{', unused' if entry['instead'] else ''}")
    _print_operands(entry)
    serves = entry["serves"]
    if entry["instead"]:
        on = f", here for {_kind(serves['gpu'])}, not measured" if serves else ""
        print(f"gives way to {_instead(entry['instead'])}{on}")
    if serves:
        _print_serving(serves)
    if "ranges" not in entry:
        return
    if entry["torch_faster"]:
        ranges = ", ".join(_interval(row) for row in entry["torch_faster"])
        print(f"torch was faster at M = {ranges}: {_faster_with_torch(entry)} that were measured")
    for environment in entry["tuning"]:
        print(_environment(environment))
    print("\nof the entry itself, which serves nothing:" if entry["instead"] else "")
    _print_table(["M", "function"], [[_interval(row), row["function"]] for row in entry["ranges"]], right={0})
    if entry["invariant"]:
        print()
        rows = [[_interval(row), row["function"]] for row in entry["invariant"]]
        _print_table(["M", "function, of those that give equal bits at every M"], rows, right={0})
    if entry["timings"]:
        print()
        header = ["M", "us", "spread", "baseline us", "spread", "ratio", "sustained", "other us"]
        header += ["function", "best other"]
        _print_table(header, [_timing(row) for row in entry["timings"]], right=range(8))
    for row in entry["candidates"]:
        print(f"\ncandidates at M = {row['m']}, best first:")
        for name in row["functions"]:
            print(f"  {name}")


def print_predicted(entry: dict[str, Any]) -> None:
    """What `aot show` prints for a signature that a form computes."""
    entry = _cleaned(entry)
    print(f"{entry['key']} on {entry['target']}: {entry['state']} for {_kind(entry['gpu'])}, not measured")
    _print_operands(entry)
    _print_serving(entry)


def _print_serving(serves: dict[str, Any]) -> None:
    """What serves at some M: by prediction, for a kind of GPU, or of an entry, with the times that were measured."""
    us = "us"
    if serves["state"] == PREDICTED:
        us, checked = "predicted us", ", ".join(serves["checked_on"])
        count = serves["functions"]
        print(f"functions that can compute it: {count}, {f'checked on {checked}' if checked else 'never run'}")
    titles = {"choices": "function", "invariant": "function, of those that give equal bits at every M"}
    for choices, title in titles.items():
        if serves[choices]:
            print()
            rows = [[str(c["m"]), "" if c["us"] is None else f"{c['us']:.1f}", c["function"]] for c in serves[choices]]
            _print_table(["M", us, title], rows, right={0, 1})


def print_function(function: dict[str, Any]) -> None:
    """What `aot show` prints for a function."""
    function = _cleaned(function)
    cubin, program = function["cubin"], function["program"]
    print(function["name"])
    print(f"family   {function['family']}")
    print(f"target   {function['target']}")
    if function["checked_on"]:
        print(f"right on {', '.join(function['checked_on'])}")
    print(f"cubin    {cubin['bytes']:,} bytes, sha256 {cubin['sha256']}")
    print(f"program  {program['nodes']} nodes, {program['bytes']:,} bytes of JSON\n")
    _print_table(["argument", "kind", "type", "shape", "strides", "must be"], list(_arguments(function["arguments"])))
    if function["symbols"]:
        print()
        rows = [[n, f"i{s['width']}", f"a multiple of {s['divisibility']}"] for n, s in function["symbols"].items()]
        _print_table(["symbol", "type", "must be"], rows)
    for launch in function["launches"]:
        kernel = function["kernels"][launch["kernel"]]
        registers, static, local = (kernel[what] for what in ("registers", "shared_bytes", "local_bytes"))
        dynamic = _extents([launch["shared_bytes"]])
        sizes = launch["parameter_bytes"]
        print(f"\nlaunches {kernel['symbol']}")
        print(f"  {registers} registers a thread, {local} bytes of local memory")
        print(f"  grid {_extents(launch['grid'])}, block {_extents(launch['block'])}")
        print(f"  {static} bytes of static shared memory, {dynamic} dynamic")
        print(f"  {len(sizes)} parameters of {sum(sizes)} bytes, {launch['tma_descriptors']} TMA descriptors")
        for name, words in launch["attributes"].items():
            print(f"  {name} {_extents(words)}")


def print_checks(causes: Iterable[tuple[Finding, int]], warned: Iterable[Finding]) -> None:
    """What `aot verify` prints: each cause of failed checks, how many others it brought down, and each warning."""
    for check, others in causes:
        name = check.subject.rpartition(" ")[2]
        say(f"{check.subject}: {check.detail.removeprefix(f'function {name}: ')}")
        if others:
            print(f"  and {others} checks that need it" if others > 1 else "  and 1 check that needs it")
    for check in warned:
        print(printable(f"warning: {check.subject}: {check.warning}"))


def _kind(gpu: dict[str, Any] | None) -> str:
    """A kind of GPU, such as "NVIDIA H200 (132 SMs, 4800 GB/s)"; empty for any."""
    return "" if gpu is None else Gpu(**gpu).words()


def _faster_with_torch(counts: dict[str, Any]) -> str:
    return f"{counts['faster_with_torch']} of {counts['measured']}" if counts["measured"] else ""


def _built_by(tools: dict[str, str]) -> str:
    """What compiled the functions, in a line."""
    own, compiler = (tools.get(name, UNKNOWN) for name in ("cute-aot", "nvidia-cutlass-dsl"))
    by = "a cute-aot whose version it does not say" if own == UNKNOWN else f"cute-aot {own}"
    return f"built by {by}" + ("" if compiler == UNKNOWN else f" with nvidia-cutlass-dsl {compiler}")


def _environment(environment: dict[str, Any]) -> str:
    """Where timings are from, in a line that leaves out what is not known."""
    labels = {
        "driver": "driver",
        "cuda": "CUDA",
        "torch": "torch",
        "cublas": "cuBLAS",
        "cute_aot": "cute-aot",
    }
    versions = [
        f"{label} {environment[name]}" for name, label in labels.items() if environment.get(name) not in (None, UNKNOWN)
    ]
    done = "functions checked" if "right" in environment else "tuned"
    return ", ".join([f"{done} on {environment['gpu']}", *versions])


def _operand(operand: dict[str, Any]) -> str:
    """A tensor, such as "bias bf16 (4096)"."""
    shape = ", ".join(map(str, operand["shape"]))
    return f"{operand['name']} {operand['dtype']} ({shape}){' transposed' if operand['transposed'] else ''}"


def _print_operands(entry: dict[str, Any]) -> None:
    """What manifests call a signature, and what it takes."""
    if entry["names"]:
        print(f"{_names_of(entry['operation'])}: {', '.join(entry['names'])}")
    print(f"takes: {', '.join(_operand(o) for o in entry['operands'])}")
    said = {name: word for name, word in entry["signature"].items() if name in ("epilogue", "scaling", "overlap")}
    if unusual := [f"{name} {word}" for name, word in said.items() if word not in ("none", "serial")]:
        print(f"with: {', '.join(unusual)}")


def _form(form: dict[str, Any]) -> list[str]:
    multiples = " or ".join(f"{pair['n']}, {pair['k']}" for pair in form["multiples"])
    checked = ", ".join(form["checked_on"]) or "never run"
    return [form["form"], form["target"], str(form["functions"]), multiples, checked]


def _timing(row: dict[str, Any]) -> list[str]:
    return [
        str(row["m"]),
        f"{row['us']:.1f}",
        _percent(row.get("spread")),
        f"{row['baseline_us']:.1f}",
        _percent(row.get("baseline_spread")),
        f"{row['ratio']:.2f}x",
        "" if row["sustained_ratio"] is None else f"{row['sustained_ratio']:.2f}x",
        "" if row.get("runner_up_us") is None else f"{row['runner_up_us']:.1f}",
        row["function"],
        row.get("runner_up") or "",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _arguments(arguments: Iterable[dict[str, Any]], prefix: str = "") -> Iterable[list[str]]:
    """The rows of an argument table, tuples followed by their items."""
    for a in arguments:
        name = prefix + a["name"]
        shape, strides = (f"({', '.join(map(str, a[part]))})" if part in a else "" for part in ("shape", "strides"))
        owed = {
            "tensor": f"aligned to {a.get('alignment')} bytes",
            "device": f"{a.get('property')} for clusters of {a.get('cluster_size')}, which the runtime asks the device",
            "workspace": f"{a.get('bytes')} bytes{_each(a)}, which the runtime provides",
            "none": "None",
        }
        yield [name, a["kind"], a.get("dtype", ""), shape, strides, owed.get(a["kind"], "")]
        yield from _arguments(a.get("items", ()), f"{name}.")


def _each(workspace: dict[str, Any]) -> str:
    zeros = " of zeros" if workspace.get("zeroed") else ""
    return zeros if workspace.get("each") is None else f"{zeros} for each of {workspace['each']}"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> None:
    """Print columns two spaces apart, those numbered in `right` aligned to the right; leave out empty columns."""
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in [header, *rows]) for i in kept}
    to_right = set(right)
    for row in [header, *rows]:
        cells = [row[i].rjust(widths[i]) if i in to_right else row[i].ljust(widths[i]) for i in kept]
        print("  ".join(cells).rstrip())


def _interval(row: dict[str, Any]) -> str:
    low, high = row["m_min"], row["m_max"]
    return f"{low}-" if high is None else str(low) if low == high else f"{low}-{high}"


def _extents(values: Iterable[int | None]) -> str:
    """Numbers with an x between them; a question mark for what depends on the arguments."""
    return "x".join("?" if value is None else str(value) for value in values)
