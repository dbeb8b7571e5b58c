"""What agents work on and with: data sets and tools."""

from __future__ import annotations

from pydantic import Field, model_validator

from agentrl.config.paths import PathText
from agentrl.config.section import Section


class DatasetConfig(Section):
    """Tasks from a file or an embedded set. `columns` maps our names (id, question, answer) to the file's."""

    path: PathText | None = Field(
        None, description="a .jsonl, .json or .csv file, a folder laid out as DSBench, or the name of an embedded set"
    )
    split: str | None = Field(None, description="embedded sets and DSBench folders only")
    columns: dict[str, str] = Field(default_factory=dict)
    format: str | None = Field(
        None, description="the public benchmark whose rows the file holds, as published (agentrl data list)"
    )
    limit: int | None = Field(None, ge=1, description="the first tasks only")
    sample: int | None = Field(None, ge=1, description="so many tasks, drawn at random by sample_seed")
    sample_seed: int = Field(0, description="the same seed draws the same ids, whatever their order in the file")

    @model_validator(mode="after")
    def _one_way_to_take_fewer(self) -> DatasetConfig:
        if self.sample is not None and self.limit is not None:
            raise ValueError("limit: has no effect with sample; set one of the two")
        if self.sample is None and self.turned("sample_seed"):
            raise ValueError("sample_seed: has no effect without sample; set sample too, or leave it out")
        return self


class DataConfig(DatasetConfig):
    eval: DatasetConfig = DatasetConfig()
    shuffle: bool = True
    stratify: str | None = Field(
        None, description="a column of the tasks, such as kind: each step takes its values in even shares"
    )

    @model_validator(mode="after")
    def _stratum_needs_shuffle(self) -> DataConfig:
        if self.stratify is not None and not self.shuffle:
            raise ValueError("stratify: has no effect with shuffle: false; leave one of the two out")
        return self


class SearchToolConfig(Section):
    """BM25 over a local corpus of JSON lines with `title` and `text`."""

    corpus: PathText = Field(..., description="a .jsonl file, or the name of an embedded corpus")
    top_k: int = Field(10, ge=1)
    index_dir: PathText | None = Field(None, description="where the index is kept; none: the user's cache folder")
    timeout_s: float = Field(30.0, gt=0)


class PythonToolConfig(Section):
    """Model-written Python in the sandbox."""

    timeout_s: float = Field(30.0, gt=0)
    memory_mib: int = Field(1024, ge=64)
    workspace_mib: int = Field(
        128, ge=8, description="the program's folder, in memory; one file takes half of it at most"
    )
    max_output_bytes: int = Field(20_000, ge=100)
    max_concurrent: int = Field(4, ge=1)


class WebToolConfig(Section):
    """A web search service whose pages are fetched and handed on whole."""

    api_key_env: str = Field("SERPER_API_KEY", description="environment variable that holds the key")
    top_k: int = Field(10, ge=1)
    timeout_s: float = Field(30.0, gt=0)


class ScholarToolConfig(Section):
    """A search service for papers."""

    api_key_env: str = Field("SERPER_API_KEY", description="environment variable that holds the key")
    top_k: int = Field(10, ge=1)
    timeout_s: float = Field(30.0, gt=0)


class ToolsConfig(Section):
    search: SearchToolConfig | None = None
    web: WebToolConfig | None = None
    scholar: ScholarToolConfig | None = None
    python: PythonToolConfig | None = None
    custom: dict[str, str] = Field(default_factory=dict, description="name -> module:function that returns a Tool")
