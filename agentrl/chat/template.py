"""Chat templates: found in a model folder, compiled and rendered as transformers does, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: renders its body, in a scope of its own as transformers' tag has."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja2 reads

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str, now: datetime | None = None) -> jinja2.Template:
    """Compile one template in Jinja2's immutable sandbox, with the names transformers gives it.

    `now` is the moment `strftime_now` tells; None tells the time of each render, so prompts may change overnight.
    Raises `ConfigError` when the template has a syntax error.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as fault:
        raise ConfigError(
            f"the chat template has a syntax error at line {fault.lineno}: {fault.message}",
            "repair chat_template.jinja in the model's folder",
        ) from fault


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name ("default", "tool_use", ...), in transformers' order of precedence.

    Files (`chat_template.jinja`, `additional_chat_templates/*.jinja`) replace what tokenizer_config.json holds.
    Raises `ConfigError` when the folder has none.
    """
    files = {p.stem: p.read_text("utf-8") for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (main := folder / "chat_template.jinja").is_file():
        files["default"] = main.read_text("utf-8")
    if files:
        return files
    inline = tokenizer_config.get("chat_template")
    if inline is None and (legacy := folder / "chat_template.json").is_file():
        inline = json.loads(legacy.read_text("utf-8")).get("chat_template")
    if isinstance(inline, str):
        return {"default": inline}
    if isinstance(inline, list):
        return {entry["name"]: entry["template"] for entry in inline}
    if isinstance(inline, dict):
        return dict(inline)
    raise ConfigError(
        f"{folder} has no chat template (no chat_template.jinja, none in tokenizer_config.json)",
        "use an instruct model, or put a chat_template.jinja into the model's folder",
    )
