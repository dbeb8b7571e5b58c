"""The one build step that pyproject.toml cannot say: the recipes and the links among them travel in the wheel as
`agentrl/shipped/`."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the shipped recipes into the built package. An editable install reads them where they lie."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._recipes():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target, preserve_mode=False)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(source for source, _ in self._recipes())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        recipes = [] if self.editable_mode else [target for _, target in self._recipes()]
        return [*super().get_outputs(include_bytecode), *recipes]

    def _recipes(self) -> list[tuple[str, str]]:
        shipped = Path(self.build_lib) / "agentrl" / "shipped"
        files = sorted(
            file
            for pattern in ("*.yaml", "links/*/*.safetensors", "links/*/*.json")
            for file in Path("recipes").rglob(pattern)
        )
        return [(str(file), str(shipped / file.relative_to("recipes"))) for file in files]


setup(cmdclass={"build_py": BuildWithRecipes})
