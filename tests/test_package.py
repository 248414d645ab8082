"""The package as a whole: what importing does, what is shipped, and what the README promises."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cactus_kernels

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment or None, cwd=ROOT
    )


def test_importing_loads_nothing():
    done = python(
        "import sys, cactus_kernels; print([m for m in sys.modules if m.startswith(('torch', 'cactus_kernels.'))])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_verification_on_a_cpu_needs_torch_alone():
    done = python(
        "import sys, torch, cactus_kernels as ck\n"
        "q = torch.ones(1, 2, 5) / 5\n"
        "ck.verify(q, q[:, :1], torch.zeros(1, 1, dtype=torch.int64), 'cactus', seed=0, offset=0)\n"
        "others = 'transformers', 'typer', 'matplotlib', 'cactus_kernels.kernels.verify', 'cactus_kernels.decoding.generate'\n"
        "print([m for m in others if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("absent", [("triton",), ("transformers",), ("triton", "transformers")], ids=" and ".join)
def test_verification_works_without(absent):
    """macOS and Windows have no triton: the torch backend serves, and asking for triton says what to do."""
    done = python(
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import torch, cactus_kernels as ck\n"
        "x = torch.ones(2, 3, 5); q = x / 5; p = torch.ones(2, 2, 5) / 5; ids = torch.zeros(2, 2, dtype=torch.int64)\n"
        "print(ck.verify(q, p, ids, 'cactus', seed=0, offset=0).valid.all().item())\n"
        "print(ck.verify_from_logits(x, x[:, 1:], ids, 'top-k', seed=0, offset=0).valid.all().item())\n"
        "print(ck.sample(x[:, 0], seed=0, offset=0).valid.all().item(), ck.law.acceptance(p[0], q[0, 1:], 'sps').tolist())\n"
        "if 'triton' in sys.modules and sys.modules['triton'] is None:\n"
        "    try: ck.verify(q, p, ids, 'cactus', seed=0, offset=0, backend='triton')\n"
        "    except RuntimeError as error: print(error)\n"
    )
    says = ["triton is not installed: install it, or pass backend='torch'"] * ("triton" in absent)
    assert done.stdout.splitlines() == ["True", "True", "True [1.0, 1.0]", *says], done.stderr


@pytest.mark.parametrize("name", cactus_kernels.__all__)
def test_public_names_exist_and_say_what_they_are(name):
    value = getattr(cactus_kernels, name)
    assert value.__doc__ and name in dir(cactus_kernels)
    assert (value is sys.modules.get(f"cactus_kernels.{name}")) == (name == "law")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_here"):
        cactus_kernels.nothing_here  # noqa: B018


def test_version_and_licence_agree_everywhere():
    assert f"## {cactus_kernels.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "license: Apache-2.0" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A wheel and an sdist, built from a copy of the sources: the names of their files, and the wheel's metadata."""
    pytest.importorskip("setuptools")
    place = tmp_path_factory.mktemp("build")
    made = shutil.ignore_patterns(
        "__pycache__", ".*_cache", ".benchmarks", ".git", ".venv", "build", "dist", "*.egg-info"
    )
    shutil.copytree(ROOT, place / "src", ignore=made)
    code = f"from setuptools.build_meta import *; build_sdist({str(place)!r}); build_wheel({str(place)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel, tarfile.open(next(place.glob("*.tar.gz"))) as sdist:
        metadata = next(name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
        return {
            "wheel": {name for name in wheel.namelist() if ".dist-info/" not in name},
            "sdist": {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()},
            "metadata": message_from_bytes(wheel.read(metadata)),
        }


def sources(*folders):
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(archives):
    assert archives["wheel"] == sources("cactus_kernels")


def test_the_sdist_holds_what_its_tests_need(archives):
    files = {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "pyproject.toml", "setup.py", ".ci/run"}
    expected = sources("cactus_kernels", "tests", "benchmarks", "docs", "examples") | files
    assert archives["sdist"] >= expected, expected - archives["sdist"]


def test_what_is_imported_is_declared_and_nothing_else(archives):
    """Optional imports are in an extra of their own. typing_extensions is for type checkers, which have it."""
    imported = set()
    for path in (ROOT / "cactus_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    imported = {
        canonicalize_name(x) for x in imported - sys.stdlib_module_names - {"cactus_kernels", "typing_extensions"}
    }
    requirements = [Requirement(x) for x in archives["metadata"].get_all("Requires-Dist")]
    declared = {x.name.lower(): str(x.marker) for x in requirements if "extra ==" not in str(x.marker)}
    optional = {x.name for x in requirements if str(x.marker).endswith(('extra == "plot"', 'extra == "vllm"'))}
    assert {canonicalize_name(x) for x in declared} == imported - optional and optional <= imported
    assert declared["triton"] == 'platform_system == "Linux"'


def test_the_hub_folder_requires_this_release():
    requirement = Requirement((ROOT / "cactus_kernels/hub/custom_generate/requirements.txt").read_text().strip())
    assert canonicalize_name(requirement.name) == "cactus-kernels"
    assert str(requirement.specifier) == f">={cactus_kernels.__version__}"


def test_ci_runs_the_command_that_the_readme_names():
    """.ci/run reads the README's test command by its beginning; it is one line, and ends in the fast tier."""
    assert re.findall(r'^ *pip install "\.\[test\]".*$', README, re.M) == [
        '    pip install ".[test]" && pytest -n auto'
    ]


@pytest.mark.slow
def test_benchmarks_that_the_docs_name_need_the_package_alone():
    """Not what only its extras bring."""
    extras = {"pytest", "pytest_benchmark", "scipy", "peft", "matplotlib"}
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = sorted(set(re.findall(r"benchmarks/(\w+)\.py", pages)) - {"peers"})
    assert {"bench_verify", "bench_generate", "bench_heavy_twin", "batch_sensitivity", "gpu_check"} <= set(named)
    script = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({sorted(extras)!r}))
for name in {named!r}:
    importlib.import_module(name)
    print(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "benchmarks")
    assert (done.returncode, done.stdout.split()) == (0, named), done.stderr


def test_what_is_to_be_installed_is_there():
    """The package is on no index: its extras are installed from a clone, and are among those of setup.py."""
    extras = set(re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), re.M))
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "cactus_kernels").rglob("*.py")]
    said = [
        x for page in pages for x in re.findall(r"pip install (?:-e )?[\"']?([\w.-]*\[\w+\])", page.read_text("utf-8"))
    ]
    assert said and all(re.fullmatch(r"\.\[(\w+)\]", x) and x[2:-1] in extras for x in said), said


@pytest.mark.parametrize("interval", [(0, 150), (3, 288), (7, 150), (120, 999)], ids=str)
def test_the_intervals_of_batch_sensitivity_are_exact(interval, monkeypatch):
    from scipy.stats import chi2

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import batch_sensitivity

    n, compared = interval
    expected = [0.0 if n == 0 else chi2.ppf(0.025, 2 * n) / 2, chi2.ppf(0.975, 2 * n + 2) / 2]
    assert batch_sensitivity.rate(n, compared) == pytest.approx((n / compared, *(x / compared for x in expected)))


@pytest.mark.parametrize(
    "page", ["README.md", *(pytest.param(f"docs/{page}.md", marks=pytest.mark.slow) for page in ("engine", "generate"))]
)
def test_examples_run(page):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert examples
    for example in examples:
        done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 20


def test_files_that_the_readme_and_docs_link_to_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_test_that_the_docs_name_exists():
    for page in (ROOT / "docs").glob("*.md"):
        for file, name in re.findall(r"(test_\w+\.py)::(\w+)", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in next((ROOT / "tests").rglob(file)).read_text(), f"{page.name} names {file}::{name}"
