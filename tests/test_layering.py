"""The import rules of the design, enforced: who may import whom, and that the host half runs without jax.

The rules are the tables below. The first half reads syntax trees, so an import inside a function or behind
``TYPE_CHECKING`` counts too; the second half imports the real modules with jax blocked.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHIPPED = ("paxkv", "pallas_kernels", "experiments", "scripts")
JAX_FAMILY = ("jax", "jaxlib", "flax", "optax", "orbax")

JAX_FREE = tuple(
    f"paxkv.{name}" for name in ("config", "request", "sampling", "workload", "sizing", "metrics", "record")
)
DEVICE_BASE = (*JAX_FREE, "paxkv.compat", "paxkv.parallel", "pallas_kernels")
SCHED_VALUES = ("paxkv.sched.plan", "paxkv.sched.beam")
DEVICE_STACK = (*DEVICE_BASE, "paxkv.cache", "paxkv.models", "paxkv.steps", *SCHED_VALUES)

# Layer → what of ours it may import besides itself. The longest matching name decides; a module of paxkv that is not
# named here (engine, testing) may import all of paxkv and pallas_kernels.
OURS = {
    "pallas_kernels": (),
    **{name: JAX_FREE for name in JAX_FREE},
    "paxkv.compat": (),
    "paxkv.parallel": (*JAX_FREE, "paxkv.compat"),
    "paxkv.sched": JAX_FREE,
    "paxkv.sim": (*JAX_FREE, "paxkv.sched"),
    "paxkv.cache": DEVICE_BASE,
    "paxkv.models": (*DEVICE_BASE, "paxkv.cache"),
    "paxkv.steps": (*DEVICE_BASE, "paxkv.cache", "paxkv.models", *SCHED_VALUES),
    "paxkv.aot": DEVICE_STACK,
    "paxkv.output": (*DEVICE_STACK, "paxkv.sched"),
    "paxkv.driver": (*DEVICE_STACK, "paxkv.sched", "paxkv.output", "paxkv.engine"),
    "paxkv.engine_config": DEVICE_STACK,
    "paxkv.admission": (*JAX_FREE, "paxkv.sched"),
    "paxkv.intake": (*DEVICE_STACK, "paxkv.sched", "paxkv.output"),
    "paxkv.inflight": (*DEVICE_STACK, "paxkv.sched", "paxkv.output"),
    "paxkv.plan_loop": (*DEVICE_STACK, "paxkv.sched", "paxkv.inflight", "paxkv.intake", "paxkv.output"),
    "paxkv.engine": (
        *DEVICE_STACK,
        "paxkv.sched",
        *(f"paxkv.{name}" for name in ("admission", "driver", "engine_config", "inflight", "output", "plan_loop")),
    ),
}
ROOT_NAMES = ("paxkv", "paxkv.__version__")  # the package root is free to all of paxkv
# Layer → what of others it may import besides the standard library. Layers not named here: anything.
OTHERS = {
    "pallas_kernels": ("jax", "jaxlib", "numpy", "jaxtyping"),
    **{name: ("numpy",) for name in (*JAX_FREE, "paxkv.sched", "paxkv.sim")},
}
FLAGS_ALLOWED = ("experiments", "scripts")
JAX_EXPERIMENTAL_ALLOWED = ("pallas_kernels", "paxkv.aot", "paxkv.compat")


def within(name: str, layers: tuple[str, ...]) -> bool:
    """Whether ``name`` is one of ``layers`` or inside one."""
    return any(name == layer or name.startswith(layer + ".") for layer in layers)


def layer_of(module: str, table: dict[str, tuple[str, ...]]) -> str | None:
    """The longest layer of ``table`` that holds ``module``."""
    return max((layer for layer in table if within(module, (layer,))), key=len, default=None)


def module_name(path: pathlib.PurePath) -> str:
    """``paxkv/sched/plan.py`` → ``paxkv.sched.plan``; a package's ``__init__.py`` → the package."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: pathlib.PurePath, source: str) -> list[tuple[int, str]]:
    """Every (line, dotted name) that ``source`` imports. ``from a import b`` gives ``a.b``: b may be a module."""
    package = path.parent.parts
    found = []
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = list(package[: len(package) - node.level + 1]) if node.level else []
            base = above + (node.module.split(".") if node.module else [])
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0]
            if function in ("import_module", "__import__") and isinstance(name, ast.Constant):
                found.append((node.lineno, str(name.value)))
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax.experimental."):
            found.append((node.lineno, ast.unparse(node)))
    return found


def violations(path: pathlib.PurePath, source: str) -> list[str]:
    """The import rules that ``source``, lying at ``path`` below the root, breaks: one line each."""
    module = module_name(path)
    top = module.split(".")[0]
    ours, others = layer_of(module, OURS), layer_of(module, OTHERS)
    found = []
    for line, name in imports(path, source):
        target = name.split(".")[0]

        def broken(rule: str, line: int = line, name: str = name) -> None:
            found.append(f"{path}:{line}: imports {name}: {rule}")

        if path.name == "__init__.py" and target in JAX_FAMILY:
            broken("no __init__ imports jax")
        if target in ("experiments", "scripts", "tests") and top not in ("experiments", "scripts"):
            broken("nothing imports experiments, scripts or tests")
        elif target in ("paxkv", "pallas_kernels"):
            allowed = ("paxkv", "pallas_kernels") if ours is None else (ours, *OURS[ours])
            allowed_root = ROOT_NAMES if top == "paxkv" else ()
            if top in ("paxkv", "pallas_kernels") and not within(name, allowed) and name not in allowed_root:
                broken(f"{ours} may import only {', '.join(allowed)} of ours")
        elif others and target not in (*sys.stdlib_module_names, *OTHERS[others]):
            broken(f"{others} may import only the standard library and {', '.join(OTHERS[others])}")
        if within(name, ("absl.flags", "absl.app")) and not within(module, FLAGS_ALLOWED):
            broken(f"absl flags exist only in {', '.join(FLAGS_ALLOWED)}")
        if within(name, ("jax.experimental",)) and not within(module, JAX_EXPERIMENTAL_ALLOWED):
            broken(f"JAX's experimental API is used only in {', '.join(JAX_EXPERIMENTAL_ALLOWED)}")
    return found


def sources() -> list[pathlib.PurePath]:
    """Every shipped Python file, relative to the root."""
    return sorted(path.relative_to(ROOT) for top in SHIPPED for path in (ROOT / top).rglob("*.py"))


def test_every_file_keeps_the_rules():
    paths = sources()
    assert {"paxkv", "pallas_kernels", "experiments"} <= {path.parts[0] for path in paths}
    broken = [line for path in paths for line in violations(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("paxkv/__init__.py", "import jax", "no __init__"),
        ("paxkv/cache/__init__.py", "def f():\n    from flax import linen", "no __init__"),
        ("pallas_kernels/pages.py", "from paxkv.config import ModelShape", "may import only pallas_kernels"),
        ("pallas_kernels/pages.py", "import paxkv", "may import only pallas_kernels"),
        ("pallas_kernels/pages.py", "import flax", "standard library and jax"),
        ("paxkv/sched/plan.py", "import jax.numpy as jnp", "standard library and numpy"),
        ("paxkv/sched/plan.py", "from paxkv.sim import simulate", "may import only paxkv.sched"),
        ("paxkv/sched/plan.py", "from ..cache import pages", "may import only paxkv.sched"),
        ("paxkv/sched/plan.py", "from .. import cache", "may import only paxkv.sched"),
        ("paxkv/sched/plan.py", "import importlib\nimportlib.import_module('jax')", "standard library and numpy"),
        ("paxkv/workload/arrivals.py", "import paxkv.sched.plan", "may import only paxkv.workload"),
        ("paxkv/sim/simulate.py", "import rich", "standard library and numpy"),
        ("paxkv/sim/simulate.py", "import paxkv.steps.step", "may import only paxkv.sim"),
        ("paxkv/steps/step.py", "from paxkv.sched import scheduler", "may import only paxkv.steps"),
        ("paxkv/models/layers.py", "from paxkv.steps import inputs", "may import only paxkv.models"),
        ("paxkv/engine.py", "from paxkv.sim import simulate", "may import only paxkv.engine"),
        ("paxkv/engine.py", "import experiments.run", "nothing imports experiments"),
        ("paxkv/testing/tiny.py", "from scripts import size", "nothing imports experiments, scripts"),
        ("paxkv/engine.py", "from absl import flags", "absl flags"),
        ("paxkv/engine.py", "from jax.experimental import pallas", "experimental"),
        ("experiments/fig01.py", "import jax\njax.experimental.pallas.load", "experimental"),
    ],
)
def test_checker_catches(path, source, rule):
    found = violations(pathlib.PurePosixPath(path), source)
    assert found, "the rule was broken and nothing said so"
    assert rule in found[0]
    assert found[0].startswith(f"{path}:{len(source.splitlines())}: ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "paxkv/sched/scheduler.py",
            "import heapq\nimport numpy\nfrom paxkv.config import X\nfrom . import plan",
        ),
        ("paxkv/sched/__init__.py", "from paxkv.sched.plan import StepPlan"),
        ("paxkv/sim/simulate.py", "from paxkv.sched.scheduler import Scheduler\nfrom paxkv.workload import poisson"),
        ("paxkv/record.py", "from paxkv import __version__"),
        ("paxkv/steps/step.py", "import jax\nfrom paxkv.sched.plan import StepPlan\nfrom paxkv.models import decoder"),
        ("paxkv/compat.py", "from jax.experimental import layout"),
        (
            "pallas_kernels/kv_write/tpu.py",
            "import jax.experimental.pallas as pl\nfrom pallas_kernels import pages",
        ),
        (
            "paxkv/testing/oracle.py",
            "import jax\nfrom paxkv.sched.events import Event\nimport paxkv.cache.pages",
        ),
        ("experiments/run.py", "from absl import app, flags\nimport rich\nfrom paxkv.sim import simulate"),
        ("scripts/size.py", "from absl import flags\nfrom experiments import paper"),
    ],
)
def test_checker_allows(path, source):
    assert violations(pathlib.PurePosixPath(path), source) == []


# Refuses JAX_FAMILY, then imports the modules named on the command line.
IMPORT_WITHOUT_JAX = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {JAX_FAMILY!r}:
            raise ImportError(f"blocked: {{name}}")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not set({JAX_FAMILY!r}) & set(sys.modules)
"""


def import_without_jax(names: list[str], folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Import ``names`` in a new interpreter started in ``folder`` where nothing of JAX can be imported."""
    command = [sys.executable, "-c", IMPORT_WITHOUT_JAX, *names]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_host_half_imports_without_jax():
    names = [module_name(path) for path in sources()]
    names = [name for name in names if within(name, (*JAX_FREE, "paxkv.sched", "paxkv.sim"))]
    assert {"paxkv.sched.scheduler", "paxkv.sim.simulate"} <= set(names)
    result = import_without_jax(names, ROOT)
    assert result.returncode == 0, result.stderr


def test_no_package_root_needs_jax():
    packages = [path for path in sources() if path.name == "__init__.py"]
    assert packages
    result = import_without_jax([module_name(path) for path in packages], ROOT)
    assert result.returncode == 0, result.stderr


def test_blocker_catches(tmp_path):
    (tmp_path / "wrong.py").write_text("import jax.numpy\n")
    result = import_without_jax(["wrong"], tmp_path)
    assert result.returncode != 0
    assert "blocked: jax" in result.stderr
