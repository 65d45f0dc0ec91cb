"""The proof on a machine without the devices: what is on its list, what it keeps, what fails it and what it shows."""

from __future__ import annotations

import collections
import concurrent.futures
import importlib.util
import itertools
import json
import re
import shutil
import sys

import pytest

from pallas_kernels import prove
from pallas_kernels.pages import PageFormat
from pallas_kernels.proof import committed, gates, runner, sources, tables, targets
from pallas_kernels.proof.cases import CHOICES, Case, all_cases, cases_for
from pallas_kernels.proof.specs import WriteSpec

NATIVE = [("tpu", "v5e"), ("tpu", "v6e"), ("tpu", "7x"), ("mosaic_gpu", "sm_90a")]
FORMATS = {
    PageFormat("bfloat16"),
    *(PageFormat("float8_e4m3fn", scale) for scale in ("none", "tensor", "head", "token")),
    *(PageFormat("int8", scale) for scale in ("tensor", "head", "token")),
}


def musts(op: str, implementation: str, target: str) -> list[Case]:
    """The cases of an op that have to run natively, without those of attention that are there for their schedules."""
    return [
        case
        for case in cases_for(target)
        if (case.op, case.implementation, case.must) == (op, implementation, True)
        and not (op == "paged_attention" and case.gated)
    ]


# --- the list -----------------------------------------------------------------------------------------------------


def test_cases_have_names_of_their_own():
    counts = collections.Counter(case.name for case in all_cases())
    assert counts.most_common(1)[0][1] == 1
    assert {case.target for case in all_cases()} == {"v4", "v5e", "v5p", "v6e", "7x", "sm_80", "sm_90a", "sm_100a"}


def test_what_has_to_run_natively_is_on_the_list_and_nothing_else():
    natively = {(case.implementation, case.target) for case in all_cases() if case.must} - {
        ("xla", target) for target in targets.TARGETS
    }
    assert natively == set(NATIVE)


@pytest.mark.parametrize(("implementation", "target"), NATIVE)
def test_attention_meets_every_pair_of_formats_and_every_two_options(implementation, target):
    specs = [case.spec for case in musts("paged_attention", implementation, target)]
    assert {(spec.k, spec.v) for spec in specs} == set(itertools.product(FORMATS, FORMATS))
    seen = {
        "mode": {(min(q for q, _ in s.rows) > 1, s.max_query_len > 1) for s in specs},
        "size": {s.size for s in specs},
        "page_size": {s.page_size for s in specs},
        "grouped": {s.heads > s.kv_heads for s in specs},
        "window": {s.window is not None for s in specs},
        "soft_cap": {s.soft_cap is not None for s in specs},
        "sinks": {s.sinks for s in specs},
        "lse": {s.lse for s in specs},
    }
    either = {False, True}
    assert seen == {
        "mode": {(False, False), (True, True), (False, True)},  # decode, prefill, a mix
        "size": {64, 128},
        "page_size": {16, 128},
        **dict.fromkeys(("grouped", "window", "soft_cap", "sinks", "lse"), either),
    }

    def chosen(spec) -> dict:
        """What a call takes of each choice."""
        plain = {"heads": (spec.heads, spec.kv_heads), "mode": spec.rows, "k": spec.k, "v": spec.v}
        return {name: getattr(spec, name) for name in CHOICES if name not in plain} | plain

    calls = [chosen(spec) for spec in specs]
    for one, other in itertools.combinations(calls[0], 2):
        met = {(call[one], call[other]) for call in calls}
        all_of = [{call[name] for call in calls} for name in (one, other)]
        assert len(met) == len(all_of[0]) * len(all_of[1]), f"{one} and {other} do not meet in every way"


@pytest.mark.parametrize(("implementation", "target"), NATIVE)
def test_writes_and_copies_have_every_format(implementation, target):
    writes = [case.spec for case in musts("kv_write", implementation, target)]
    assert {spec.k for spec in writes} == {spec.v for spec in writes} == FORMATS
    assert {(spec.size, spec.page_size) for spec in writes} >= {(64, 16), (128, 16), (64, 128), (128, 128)}
    assert any(spec.k != spec.v for spec in writes)
    copies = [case.spec for case in musts("page_copy", implementation, target)]
    for kind in ("copy", "take", "put"):
        mine = [spec for spec in copies if spec.kind == kind]
        assert {dtype for spec in mine for dtype in spec.dtypes} == {"bfloat16", "float8_e4m3fn", "int8"}
        assert {spec.size for spec in mine} == {64, 128}
        assert {spec.page_size for spec in mine} == {16, 128}


def test_ci_compiles_decoding_with_each_dtype_and_lowers_for_the_other_targets():
    compiled, moving = collections.defaultdict(set), collections.Counter()
    for case in all_cases():
        if case.ci != "compile":
            continue
        assert case.must and case.gated
        if case.op == "paged_attention":
            assert case.spec.max_query_len == 1
            compiled[case.implementation, case.target].add(case.spec.k.dtype)
        else:
            moving[case.op, case.implementation, case.target] += 1
    assert compiled == {native: {"bfloat16", "float8_e4m3fn", "int8"} for native in NATIVE}
    assert moving == {(op, *native): n for op, n in (("kv_write", 2), ("page_copy", 3)) for native in NATIVE}
    assert {case.target for case in all_cases() if case.ci == "lower"} == set(targets.TARGETS)


@pytest.mark.parametrize("spec", [case.spec for case in cases_for("v5e") if case.op != "paged_attention"][::5])
def test_what_is_changed_in_place_is_an_argument(spec):
    assert set(spec.donated) - {"k_scale", "v_scale"} <= set(spec.shapes())


# --- what decides a result ----------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the package whose files may change."""
    package = tmp_path / "pallas_kernels"
    shutil.copytree(sources.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "PACKAGE", package)
    caches = (sources.imported, sources.fingerprint, sources.own_fingerprint)
    for function in caches:
        function.cache_clear()
    yield package
    for function in caches:
        function.cache_clear()


def prints(*names: tuple[str, str]) -> list[str]:
    """Fingerprints as the files are now."""
    sources.imported.cache_clear()
    sources.fingerprint.cache_clear()
    return [sources.fingerprint(*name) for name in names]


@pytest.mark.parametrize(
    ("file", "tpu", "xla"),
    [
        ("paged_attention/tpu.py", True, False),
        ("paged_attention/tpu_softmax.py", True, False),
        ("tuning/v6e.json", True, False),
        ("paged_attention/tiles.py", False, True),
        ("paged_attention/arguments.py", True, True),
        ("arguments.py", True, True),
        ("paged_attention/api.py", True, True),
        ("paged_attention/mosaic_gpu.py", False, False),
        ("paged_attention/bench.py", False, False),
        ("kv_write/tpu.py", False, False),
        ("prove.py", False, False),
    ],
)
def test_a_result_depends_on_its_own_files(copied, file, tpu, xla):
    names = ("paged_attention", "tpu"), ("paged_attention", "xla")
    before = prints(*names)
    (copied / file).parent.mkdir(exist_ok=True)
    with (copied / file).open("a") as changed:  # a new file, if there is none
        changed.write("# changed\n")
    assert [a != b for a, b in zip(before, prints(*names), strict=True)] == [tpu, xla]


def test_a_new_import_is_followed(copied):
    [before] = prints(("page_copy", "xla"))
    (copied / "page_copy" / "new.py").write_text("from pallas_kernels import platforms\n")
    path = copied / "page_copy" / "xla.py"
    path.write_text(path.read_text() + "\n\ndef late():\n    from pallas_kernels.page_copy import new\n")
    [with_it] = prints(("page_copy", "xla"))
    (copied / "platforms.py").write_text("changed = 1\n")
    assert len({before, with_it, *prints(("page_copy", "xla"))}) == 3


# --- gates --------------------------------------------------------------------------------------------------------

GATED = next(case for case in cases_for("v6e") if case.gated)
NOW = {"v6e": {"jax": "1", "libtpu": "2"}}
KERNEL = {
    "bundles_per_token": 1.0, "fills": 10, "spills": 10, "vmem_bytes": 1000, "smem_bytes": 100,
}  # fmt: skip
GPU_KERNEL = {"registers": 100, "spill_bytes": 0, "shared_bytes": 1000, "bulk_copies": 4, "wgmma": 2, "mma": 0}


def held(figures: dict, before: dict, versions=NOW, name="paged_attention_h8_t512") -> tuple[list[str], list[str]]:
    """``gates.compare`` on one kernel."""
    found = {GATED.name: {"outcome": "compiled", "kernels": {name: figures}}}
    kept = {
        "versions": NOW,
        "gates": {GATED.name: {"paged_attention": {"kernel": "paged_attention_h4_t256", **before}}},
    }
    return gates.compare([GATED], found, kept, versions)


def test_figures_that_are_equal_or_within_the_slack_pass():
    assert held(KERNEL, KERNEL) == ([], [])
    assert held({**KERNEL, "bundles_per_token": 1.0099, "spills": 18, "vmem_bytes": 1019}, KERNEL) == ([], [])


@pytest.mark.parametrize(
    ("name", "value"),
    [("bundles_per_token", 1.011), ("fills", 19), ("spills", 19), ("vmem_bytes", 1021), ("smem_bytes", 103)],
)
def test_figures_that_are_worse_fail(name, value):
    worse, notes = held({**KERNEL, name: value}, KERNEL)
    assert worse == [f"{GATED.name} paged_attention: {name}: committed {KERNEL[name]}, seen {value}"]
    assert notes == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"registers": 105}, ["registers: committed 100, seen 105"]),
        ({"wgmma": 0, "mma": 9}, ["wgmma: committed 2, seen none"]),
        ({"bulk_copies": 0}, ["bulk_copies: committed 4, seen none"]),
        ({"spill_bytes": 8}, ["spill_bytes: must be 0, seen 8", "spill_bytes: committed 0, seen 8"]),
        ({"registers": 104}, []),
    ],
)
def test_figures_of_a_gpu(change, says):
    worse, _ = held({**GPU_KERNEL, **change}, GPU_KERNEL)
    assert worse == [f"{GATED.name} paged_attention: {line}" for line in says]


def test_better_figures_are_a_note():
    worse, notes = held({**KERNEL, "bundles_per_token": 0.9}, KERNEL)
    assert worse == []
    [note] = notes
    assert "bundles_per_token: committed 0.9, seen 1.0 (better than committed; --write keeps it)" in note


def test_other_compilers_make_it_a_note():
    worse, notes = held({**KERNEL, "spills": 900}, KERNEL, versions={"v6e": {"jax": "1", "libtpu": "3"}})
    assert worse == []
    [note] = notes
    assert "spills: committed 10, seen 900 (other compilers than those of the gates)" in note


def test_a_spill_on_a_gpu_fails_even_without_a_committed_figure():
    found = {GATED.name: {"outcome": "compiled", "kernels": {"paged_attention_t8": {**GPU_KERNEL, "spill_bytes": 4}}}}
    worse, notes = gates.compare([GATED], found, {"versions": {}, "gates": {}}, NOW)
    assert len(worse) == 1 and "spill_bytes: must be 0, seen 4" in worse[0]
    assert notes == [f"{GATED.name}: no gates are committed; --write keeps these"]


def test_a_native_call_without_a_kernel_fails():
    found = {GATED.name: {"outcome": "compiled", "kernels": {}}}
    worse, notes = gates.compare([GATED], found, {"versions": NOW, "gates": {GATED.name: {"merge": KERNEL}}}, NOW)
    assert worse == [f"{GATED.name}: the compiler wrote nothing about a kernel; is it native?"]
    assert notes == [f"{GATED.name}: kernel merge is gone"]


def test_kernels_go_by_what_they_do_unless_two_do_the_same():
    kernels = {"attention_decode_h8_t64": {"fills": 1}, "attention_merge_b4": {"fills": 2}}
    assert {role: row["kernel"] for role, row in gates.roles(kernels).items()} == {
        "attention_decode": "attention_decode_h8_t64", "attention_merge": "attention_merge_b4",
    }  # fmt: skip
    assert set(gates.roles({"a_t64": {}, "a_t128": {}})) == {"a_t64", "a_t128"}


def test_missing():
    cases = [Case("kv_write", "tpu", "v6e", WriteSpec(name), must=must) for name, must in (("a", True), ("b", False))]
    refused = {"outcome": "refused", "why": "odd"}
    assert gates.missing(cases, {case.name: refused for case in cases}) == ["kv_write/a/tpu/v6e: refused: odd"]
    for outcome, fails in (("compiled", 0), ("lowered", 0), ("failed", 1), ("aborted", 1), ("late", 1), ("missing", 1)):
        assert len(gates.missing(cases, {case.name: {"outcome": outcome, "why": ""} for case in cases})) == fails


# --- tables -------------------------------------------------------------------------------------------------------


def results(target: str, outcome=lambda case: {"outcome": "compiled"}) -> dict:
    """A result for every case of a target."""
    return {case.name: outcome(case) for case in cases_for(target)}


def row_of(table: str, label: str) -> str:
    """The last cell of the line of a call."""
    [line] = [line for line in table.splitlines() if line.startswith(f"| {label}")]
    return line.split("|")[-2].strip()


def test_the_capability_table_keeps_the_compilers_words():
    def outcome(case: Case) -> dict:
        if case.implementation == "tpu" and case.spec.name in ("head size 96", "head size 80"):
            return {"outcome": "refused", "why": "head size must be a multiple of 64"}
        if case.implementation == "tpu" and case.spec.name == "ALiBi":
            return {"outcome": "failed", "why": "Mosaic: no | slopes"}
        return {"outcome": "compiled"}

    table = tables.capability(results("v6e", outcome), ["v6e"])
    assert row_of(table, "paged_attention: head size 80") == "`xla` <sup>1</sup>"
    assert row_of(table, "paged_attention: head size 96") == "`xla` <sup>1</sup>"
    assert row_of(table, "paged_attention: ALiBi") == "`xla` <sup>2</sup>"
    assert row_of(table, "paged_attention: not causal") == "`tpu`"
    assert row_of(table, "page_copy") == "`tpu`"
    assert row_of(table, "mla_attention: decode bf16") == "`xla`"
    assert table.endswith("\n\n1. head size must be a multiple of 64\n2. Mosaic: no | slopes")


def test_a_part_that_is_native_is_counted_and_nothing_is_made_up():
    writes = [case for case in cases_for("7x") if case.op == "kv_write" and case.implementation == "tpu"]

    def outcome(case: Case) -> dict:
        bad = case.implementation == "tpu" and case in writes[:3]
        return {"outcome": "aborted", "why": "LLVM ERROR"} if bad else {"outcome": "compiled"}

    table = tables.capability(results("7x", outcome), ["7x"])
    assert row_of(table, "kv_write") == f"`tpu` {len(writes) - 3} of {len(writes)}, else `xla` <sup>1</sup>"
    assert row_of(tables.capability({}, ["7x"]), "kv_write") == ""


def test_the_table_of_schedules():
    tpu = {"kernel": "paged_attention_t512", **KERNEL, "vmem_bytes": 1 << 20, "smem_bytes": 1536}
    gpu = {"kernel": "decode", **GPU_KERNEL, "shared_bytes": 2048}
    kept = {
        "gates": {
            "paged_attention/decode bf16/token p16/tpu/v6e": {"paged_attention": tpu},
            "paged_attention/decode bf16/mosaic_gpu/sm_90a": {"decode": gpu},
        }
    }
    assert tables.schedules(kept["gates"], "tpu").splitlines()[2:] == [
        "| v6e | decode bf16/token p16 | paged_attention_t512 | 1.0 | 20 | 1024 | 1.5 |"
    ]
    assert tables.schedules(kept["gates"], "gpu").splitlines()[2:] == [
        "| sm_90a | decode bf16 | decode | 100 | 0 | 2.0 | 4 | 2 |"
    ]


def test_the_summary_counts_outcomes():
    cases = [Case("kv_write", "tpu", "v6e", WriteSpec(name)) for name in "abc"]
    found = {case.name: {"outcome": "failed" if case.spec.name == "a" else "compiled"} for case in cases}
    assert tables.summary(cases, found).splitlines()[1].split() == ["v6e", "tpu", "1", "failed,", "2", "compiled"]


# --- what is committed --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A README and a place for results."""
    for name in ("CAPABILITIES", "GATES", "README"):
        monkeypatch.setattr(committed, name, tmp_path / name.lower())
    (tmp_path / "readme").write_text(f"before\n{committed.BEGIN}\nold table\n{committed.END}\nafter\n")
    return tmp_path


def measured(cases: list[Case], outcome: str = "compiled") -> dict:
    """A made-up result for each."""
    figures = {"tpu": KERNEL, "gpu": GPU_KERNEL}
    return {
        case.name: {
            "outcome": outcome,
            **({} if outcome == "compiled" else {"why": f"it {outcome}"}),
            "temp_bytes": 1,
            "seconds": 3.0,
            "kernels": {"paged_attention_t8": figures[targets.platform(case.target)]},
        }
        for case in cases
    }


def test_writing_replaces_only_the_text_between_the_marks(folder):
    cases = cases_for("v6e")
    said = committed.write(cases, measured(cases), NOW)
    assert "table" in said and "not the table" not in said
    text = (folder / "readme").read_text()
    assert text.startswith(f"before\n{committed.BEGIN}\n| call | v6e |") and text.endswith(f"{committed.END}\nafter\n")
    assert "old table" not in text and "(v6e: jax 1, libtpu 2)" in text
    committed.write(cases, measured(cases), NOW)
    assert (folder / "readme").read_text() == text
    assert committed.read_capabilities()["results"][GATED.name] == {"outcome": "compiled", "temp_bytes": 1}
    assert committed.read_gates()["gates"][GATED.name]["paged_attention"]["kernel"] == "paged_attention_t8"


@pytest.mark.parametrize("text", ["none\n", f"{committed.BEGIN}\n", f"{committed.BEGIN}{committed.END}\n" * 2])
def test_a_readme_without_its_marks_stays_as_it_is(folder, text):
    (folder / "readme").write_text(text)
    cases = cases_for("v6e")
    assert "not the table" in committed.write(cases, measured(cases), NOW)
    assert (folder / "readme").read_text() == text


def test_writing_merges_and_drops_what_is_no_longer_on_the_list(folder):
    cases = cases_for("v6e")
    committed.write(cases, measured(cases), NOW)
    kept = committed.read_capabilities()
    kept["results"]["kv_write/gone/tpu/v6e"] = {"outcome": "compiled"}
    (folder / "capabilities").write_text(json.dumps(kept))
    others = cases_for("sm_90a")
    committed.write(others, measured(others), {"sm_90a": {"jax": "1"}})
    assert set(committed.read_capabilities()["results"]) == {case.name for case in (*cases, *others)}
    committed.write(cases[:1], measured(cases[:1], "failed"), NOW)  # a part, by the same compilers
    kept = committed.read_capabilities()
    assert kept["results"][cases[0].name]["outcome"] == "failed"
    assert kept["results"][cases[1].name]["outcome"] == "compiled"
    assert set(kept["versions"]) == {"v6e", "sm_90a"}


def test_a_part_by_other_compilers_is_not_mixed_in(folder):
    cases = cases_for("v6e")
    committed.write(cases, measured(cases), NOW)
    before = [(folder / name).read_text() for name in ("capabilities", "gates", "readme")]
    newer = {"v6e": {"jax": "1", "libtpu": "3"}}
    with pytest.raises(ValueError, match="v6e was proved with .*run all its cases"):
        committed.write(cases[:5], measured(cases[:5]), newer)
    assert before == [(folder / name).read_text() for name in ("capabilities", "gates", "readme")]
    committed.write(cases, measured(cases), newer)
    assert committed.read_gates()["versions"] == newer


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--targets=v6e,v9"], "--targets: must be some of v4, .*sm_100a; got v9"),
        (["--targets="], "--targets: must be some of"),
        (["--ops=attention"], "--ops: must be some of paged_attention, .*; got attention"),
        (["--jobs=0"], "--jobs and --limit must be above 0"),
        (["--limit=-1"], "--jobs and --limit must be above 0"),
        (["--limit=nan"], "--jobs and --limit must be above 0"),
        (["--jobs=many"], "invalid int value: 'many'"),
        (["--write", "--ci"], "--write: needs compiled results"),
        (["v6e"], "unrecognized arguments: v6e"),
    ],
)
def test_bad_arguments(capsys, arguments, rule):
    with pytest.raises(SystemExit) as ended:
        prove.main(arguments)
    assert ended.value.code == 2
    assert re.search(rule, capsys.readouterr().err)


def test_no_case(capsys):
    assert prove.main(["--only=nothing like it"]) == 2
    assert "no case fits" in capsys.readouterr().err


def test_the_list(capsys):
    assert prove.main(["--list", "--ci", "--targets=v6e", "--ops=paged_attention"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lowered = [line for line in lines if line.endswith("/tpu/v6e (lowered only)")]
    assert "paged_attention/decode 64x2048 bf16 p128/tpu/v6e" in lines
    assert "paged_attention/prefill 2048 bf16 p128/tpu/v6e (lowered only)" in lowered


def test_a_compiler_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(targets.PACKAGES, "tpu", ("jax", "no-such-compiler"))
    assert prove.main(["--targets=v6e"]) == 2
    assert "compiling for v6e needs no-such-compiler, which is not installed: pip install" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(targets.PACKAGES, "tpu", ("jax",))
    (tmp_path / "file").write_text("")
    assert prove.main(["--targets=v6e", f"--workdir={tmp_path}/file/results"]) == 2
    assert f"--workdir: must be a folder that can be written; {tmp_path}/file/results: " in capsys.readouterr().err


# --- workers ------------------------------------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
log, target, dumps = sys.argv[1:]
print("a library's greeting", flush=True)
for line in sys.stdin:
    name = line.strip().removeprefix("-")
    print(json.dumps({"case": name}), flush=True)
    with open(log, "a") as file:
        file.write(name + chr(10))
    if "dies" in name:
        for words in ("some warning", "LLVM ERROR: out of registers", "a stack trace"):
            print(words, file=sys.stderr, flush=True)
        os._exit(6)
    if "hangs" in name:
        time.sleep(60)
    outcome = "lowered" if line.startswith("-") else "compiled"
    print(json.dumps({"case": name, "outcome": outcome, "seconds": 0.0}), flush=True)
"""


@pytest.fixture
def work(tmp_path):
    """Runs named cases with a worker that compiles nothing; ``log`` says which it was given."""
    (tmp_path / "worker.py").write_text(WORKER)
    versions = {target: {"jax": "1"} for target in targets.TARGETS}

    def run(names: str, targets=("v6e",), limit_s=30.0, lowered=frozenset(), jobs=2):
        cases = [Case("kv_write", "xla", target, WriteSpec(name)) for target in targets for name in names.split()]
        reported = []
        command = (sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "log"))
        settings = (frozenset(lowered), tmp_path / "results", jobs, limit_s, versions)
        found = runner.run(cases, *settings, lambda case, result: reported.append(case.name), command)
        assert sorted(reported) == sorted(found) == sorted(case.name for case in cases)
        return {name.removeprefix("kv_write/").replace("/xla/v6e", ""): result for name, result in found.items()}

    run.log = lambda: (tmp_path / "log").read_text().split() if (tmp_path / "log").is_file() else []
    run.folder = tmp_path / "results"
    return run


def test_what_is_known_is_not_done_again(work):
    first = work("a b")
    assert {result["outcome"] for result in first.values()} == {"compiled"} and len(work.log()) == 2
    assert work("a b") == first and len(work.log()) == 2
    assert work("a b c")["c"]["outcome"] == "compiled" and work.log()[2:] == ["kv_write/c/xla/v6e"]
    assert work("a", lowered={"kv_write/a/xla/v6e"})["a"]["outcome"] == "lowered"  # another question
    assert work("a") == {"a": first["a"]} and len(work.log()) == 4


def test_a_worker_that_dies_fails_its_case_and_the_rest_go_on(work):
    found = work("a dies b dies_too c")
    assert [found[name]["outcome"] for name in ("a", "b", "c")] == ["compiled"] * 3
    for name in ("dies", "dies_too"):
        assert found[name]["outcome"] == "aborted"
        assert found[name]["why"] == "the compiler ended the process (6): LLVM ERROR: out of registers"
    assert len(work.log()) == 5  # each once
    work("a dies b dies_too c")
    assert len(work.log()) == 5  # an abort is a result, too


def test_a_case_that_takes_too_long_is_tried_again_the_next_time(work):
    found = work("hangs a", limit_s=1.0)
    assert found["hangs"] == {"outcome": "late", "why": "not done after 1 s", "seconds": 1.0}
    assert found["a"]["outcome"] == "compiled"
    work("hangs a", limit_s=1.0)
    assert [name.split("/")[1] for name in work.log()] == ["hangs", "a", "hangs"]


def test_a_worker_that_does_not_start(work, tmp_path):
    (tmp_path / "worker.py").write_text("raise ImportError('no such library')\n")
    found = work("a b")
    assert {result["outcome"] for result in found.values()} == {"aborted"}
    assert found["a"]["why"] == "the compiler ended the process (1): ImportError: no such library"


def test_two_runs_at_once_share_a_folder(work):
    names = " ".join(f"case{i}" for i in range(20))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, other = (future.result() for future in [pool.submit(work, names, ("v6e", "7x")) for _ in range(2)])
    assert one == other
    kept = list(work.folder.iterdir())
    assert len(kept) == 40 and {path.suffix for path in kept} == {".json"}
    assert all(json.loads(path.read_text())["outcome"] == "compiled" for path in kept)


def test_nothing_to_do(work):
    assert work("") == {} and work.log() == []


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU's compiler is not installed: .[aot]")
def test_the_real_worker(tmp_path):
    """One call compiled and one lowered, in one process; then both are known."""
    versions = {"v6e": targets.versions("v6e")}
    listed = [
        case for case in cases_for("v6e") if case.op in ("kv_write", "page_copy") and case.implementation == "xla"
    ]
    chosen = [listed[0], listed[-1]]
    arguments = (frozenset({chosen[1].name}), tmp_path, 1, 120.0, versions, lambda case, result: None)
    found = runner.run(chosen, *arguments)
    assert found[chosen[0].name]["outcome"] == "compiled" and found[chosen[0].name]["temp_bytes"] >= 0
    assert found[chosen[1].name]["outcome"] == "lowered"
    assert runner.run(chosen, *arguments, ("false",)) == found
