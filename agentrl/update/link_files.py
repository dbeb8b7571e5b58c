"""Link files: the official layout (`.pt`, a pickled state dict) and ours (`.safetensors`, which says what it is).

Official files are read with weights-only unpickling, so loading one runs no code. They hold no model names; ours name
the two models, the task and the form in their metadata, and a file of another pair is refused.

Official folders (specs, section 9): a role's repository holds `innerlink_config.json` and `adapter(math).pt` or a
plain `adapter.pt`; the outer repository holds `outerlink_config.json`, which lists one file per edge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import DataError, MissingError
from agentrl.update.links import FORMS, Form, InnerLink, Link, OuterLink

INNER_TYPE, OUTER_TYPE = "ln_res_adapter", "outer_ln_res_adapter"
Kind = Literal["inner", "outer"]
StoredDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Which link is meant: from model `source` (hidden size `dim_in`) to `target` (`dim_out`); the two are one model
    for an inner link. `task` is a task family (math, code), or "any"."""

    kind: Kind
    source: str
    target: str
    dim_in: int
    dim_out: int
    form: Form = "ln_res"
    task: str = "any"
    target_norm: float | None = None

    @classmethod
    def inner(cls, model: str, dim: int, **rest: Any) -> LinkSpec:
        return cls("inner", model, model, dim, dim, **rest)

    @classmethod
    def outer(cls, source: str, target: str, dim_in: int, dim_out: int, **rest: Any) -> LinkSpec:
        return cls("outer", source, target, dim_in, dim_out, **rest)

    @property
    def title(self) -> str:
        if self.kind == "inner":
            return f"an inner link of {self.source} ({self.dim_in})"
        return f"an outer link from {self.source} ({self.dim_in}) to {self.target} ({self.dim_out})"

    def build(self) -> Link:
        """A new link with random weights (the framework's default initialisation, from torch's global generator)."""
        if self.kind == "inner":
            return InnerLink(self.dim_in, self.form, target_norm=self.target_norm)
        return OuterLink(self.dim_in, self.dim_out, self.form, target_norm=self.target_norm)


def save_link(
    link: Link,
    path: Path,
    spec: LinkSpec,
    dtype: StoredDtype = "float32",
    training: Mapping[str, Any] | None = MappingProxyType({}),
) -> None:
    """Write one link. `.pt` is the official layout, `.safetensors` ours with the metadata of `spec` and `training`:
    how it was trained, None for random weights."""
    state = {
        name: tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
        for name, tensor in link.state_dict().items()
    }
    if path.suffix == ".pt":
        torch.save(state, path)
        return
    assert path.suffix == ".safetensors", f"{path}: links are stored as .pt or .safetensors"
    metadata = {**_metadata(spec), "training": None if training is None else dict(training)}
    save_file(state, path, {key: json.dumps(value) for key, value in metadata.items()})


def load_link(path: Path, spec: LinkSpec) -> Link:
    """The link in a file, in fp32, checked against `spec`.

    Raises `MissingError` for a file that is not there, and `DataError` for one that is no plain state dict, lacks or
    adds keys, has another shape, holds NaN or infinity, or (ours) was made for other models, another task or form.
    """
    state = read_state(path, spec)
    link = spec.build()
    expected = {name: tuple(tensor.shape) for name, tensor in link.state_dict().items()}
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or extra:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has also {', '.join(extra)}"] * bool(extra)
        raise DataError(f"{path} {' and '.join(parts)}: not {spec.title} of form {spec.form}", _form_hint(state))
    for name, tensor in state.items():
        if tuple(tensor.shape) != expected[name]:
            raise DataError(
                f"{path}: {name} is {tuple(tensor.shape)}, {spec.title} has {expected[name]}",
                "name the link file of this pair of models",
            )
        if not tensor.dtype.is_floating_point or not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{path}: {name} holds values that are no finite numbers", "train or fetch the link again")
    link.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
    return link


def read_state(path: Path, spec: LinkSpec | None = None) -> dict[str, Tensor]:
    """The tensors of a link file as stored. With `spec`, the metadata of one of our files must agree with it."""
    if not path.is_file():
        raise MissingError(f"there is no link file {path}", "train the links, or name the folder that holds them")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as handle:
                if spec is not None:
                    _check_metadata(path, handle.metadata() or {}, spec)
                return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise DataError(f"{path} is cut short or no safetensors file ({error})", "fetch the link again") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a malformed pickle raises anything at all inside the unpickler
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise DataError(
            f"{path} is no plain state dict of tensors ({type(error).__name__}: {reason[:160]})",
            "fetch the file again; a pickle that holds anything but tensors is never opened",
        ) from None
    odd = (
        [key for key, value in state.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
        if isinstance(state, Mapping)
        else [type(state).__name__]
    )
    if odd:
        raise DataError(f"{path} holds {odd[0]!r}, which is no tensor", "a link file is a plain dict of tensors")
    return dict(state)


def _metadata(spec: LinkSpec) -> dict[str, Any]:
    return {
        "agentrl_link": 1,
        "kind": spec.kind,
        "form": spec.form,
        "source": spec.source,
        "target": spec.target,
        "dim_in": spec.dim_in,
        "dim_out": spec.dim_out,
        "task": spec.task,
        "target_norm": spec.target_norm,
    }


def _check_metadata(path: Path, found: Mapping[str, str], spec: LinkSpec) -> None:
    for key, wanted in _metadata(spec).items():
        try:
            value = json.loads(found[key])
        except (KeyError, ValueError):
            raise DataError(
                f"{path}: its metadata has no {key}", "write links with agentrl, or use a .pt file"
            ) from None
        if key == "task" and "any" in (value, wanted):
            continue
        if value != wanted:
            raise DataError(
                f"{path} was made with {key} {value!r}; {spec.title} for task {spec.task} needs {wanted!r}",
                "name the link file of this pair of models, or train one",
            )


def _form_hint(state: Mapping[str, Tensor]) -> str:
    normed = any("ln" in name for name in state)
    likely = [name for name, form in FORMS.items() if form.norm == normed]
    return f"check the link's form and direction; by its keys this file is one of {', '.join(likely)}"


# Official folders


@dataclass(frozen=True, slots=True)
class OuterFile:
    """One entry of `outerlink_config.json`; `key` is the edge's official name (12, 23, 31, 1s, el, ...)."""

    key: str
    path: Path
    dim_in: int
    dim_out: int


def official_inner_file(folder: Path, task: str) -> Path:
    """The inner link file of a role's repository for a task family: by `innerlink_config.json`, or `adapter.pt`."""
    kind = _json(folder / "adapter_config.json").get("adapter_type", INNER_TYPE)
    _check_type(folder / "adapter_config.json", kind, INNER_TYPE)
    tasks = _json(folder / "innerlink_config.json").get("tasks", {})
    if not tasks:
        return folder / "adapter.pt"
    if task not in tasks:
        raise MissingError(f"{folder} has no inner link for task {task!r}", f"it has {', '.join(sorted(tasks))}")
    entry = tasks[task]
    return _inside(folder, entry.get("adapter.pt") if isinstance(entry, Mapping) else entry)


def official_outer_files(folder: Path, task: str) -> Mapping[str, OuterFile]:
    """The outer link files of a repository for a task family, by edge key."""
    config = folder / "outerlink_config.json"
    value = _json(config)
    if not value:
        raise MissingError(f"{config} is missing", "name the folder that holds the outer links")
    if "adapters" in value:
        entries = value["adapters"]
    elif task in value.get("tasks", {}):
        entries = value["tasks"][task]["adapters"]
    else:
        have = ", ".join(sorted(value.get("tasks", {}))) or "none"
        raise MissingError(f"{folder} has no outer links for task {task!r}", f"it has {have}")
    files = {}
    for entry in entries:
        try:
            key, dim_in, dim_out = str(entry["legacy_key"]), int(entry["in_dim"]), int(entry["out_dim"])
            name = entry["filename"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{config}: a malformed entry ({error!r})", "fetch the file again") from None
        _check_type(config, entry.get("adapter_type", OUTER_TYPE), OUTER_TYPE)
        files[key] = OuterFile(key, _inside(folder, name), dim_in, dim_out)
    return files


def save_official_inner(folder: Path, links: Mapping[str, InnerLink], dtype: StoredDtype = "bfloat16") -> None:
    """Write a role's links by task family in the official layout (without the base model's weights)."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {}
    for task, link in links.items():
        tasks[task] = {"adapter.pt": f"adapter({task}).pt"}
        save_link(link, folder / f"adapter({task}).pt", LinkSpec.inner("", link.dim_in), dtype)
    _write_json(folder / "adapter_config.json", {"adapter_type": INNER_TYPE})
    _write_json(folder / "innerlink_config.json", {"tasks": tasks})


def save_official_outer(
    folder: Path,
    links: Mapping[str, Sequence[tuple[str, str, OuterLink]]],
    paradigm: str,
    dtype: StoredDtype = "bfloat16",
) -> None:
    """Write outer links by task family as (edge key, file stem, link) in the official layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks: dict[str, Any] = {}
    for task, edges in links.items():
        entries = []
        for key, stem, link in edges:
            name = f"{stem}({task}).pt"
            save_link(link, folder / name, LinkSpec.outer("", "", link.dim_in, link.dim_out), dtype)
            entry = {"legacy_key": key, "filename": name, "adapter_type": OUTER_TYPE}
            entries.append({**entry, "in_dim": link.dim_in, "out_dim": link.dim_out})
        tasks[task] = {"adapters": entries}
    _write_json(folder / "outerlink_config.json", {"format_version": 1, "paradigm": paradigm, "tasks": tasks})


def _inside(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or Path(name).name != name:
        raise DataError(f"{folder} names the link file {name!r}", "a link file lies in the folder that names it")
    return folder / name


def _check_type(path: Path, found: object, wanted: str) -> None:
    if found != wanted:
        raise DataError(f"{path}: adapter type {found!r} is not supported", f"use links of type {wanted}")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}", "fetch the file again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold a JSON object", "fetch the file again")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
