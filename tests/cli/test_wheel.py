from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_carries_the_recipes_and_finds_them_by_name(tmp_path):
    tree = tmp_path / "tree"
    (tree / "recipes" / "smoke").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "README.md").write_text("# agentrl\n")
    ring = tree / "recipes" / "links" / "ring"
    ring.mkdir(parents=True)
    for name in ("inner-planner.safetensors", "provenance.json", "notes.txt"):
        (ring / name).write_bytes(b"{}")
    for name in ("__init__.py", "errors.py"):
        (tree / "agentrl").mkdir(exist_ok=True)
        shutil.copy(ROOT / "agentrl" / name, tree / "agentrl")
    (tree / "agentrl" / "config").mkdir()
    for name in ("__init__.py", "shipped.py"):
        shutil.copy(ROOT / "agentrl" / "config" / name, tree / "agentrl" / "config")
    (tree / "recipes" / "hle.yaml").write_text("method: mars\n")
    (tree / "recipes" / "smoke" / "mars.yaml").write_text("method: mars\n")

    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    installed = tmp_path / "installed"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        wheel.extractall(installed)
    assert {"agentrl/shipped/hle.yaml", "agentrl/shipped/smoke/mars.yaml"} <= set(names)
    assert {name for name in names if "/links/" in name} == {
        f"agentrl/shipped/links/ring/{name}" for name in ("inner-planner.safetensors", "provenance.json")
    }
    assert not any(name.startswith("recipes/") for name in names)

    code = (
        "from agentrl.config.shipped import resolve_recipe as r, shipped_links as s; "
        "print(r('recipes/hle.yaml'), r('smoke/mars'), s()['ring'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(installed)},
    )
    shipped = installed / "agentrl/shipped"
    assert found.stdout.split() == [str(shipped / name) for name in ("hle.yaml", "smoke/mars.yaml", "links/ring")]
