"""Conversations as a model was trained to read them, by the Jinja template that comes with its tokenizer."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paxkv.models.tokenizer import Tokenizer

NEEDS_EXTRA = "chat templates need the package jinja2: pip install 'paxkv[hf]'"
ROLES = ("system", "user", "assistant")


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation, up to where the model's answer begins.

    The text of a message is not told apart from the template's: one that spells out special tokens gets them.

    Args:
        messages: each with a ``role`` (system, user, assistant) and its ``content``.

    Raises:
        ImportError: the package ``jinja2`` is missing.
        ValueError: no template, or one that refuses these messages.
    """
    return tokenizer.encode(render(tokenizer, messages), start=False)


def render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation as text; arguments and errors as :func:`encode_chat`."""
    if tokenizer.chat_template is None:
        raise ValueError("this model's files have no chat template; prompt it with plain text")
    for message in messages:
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise ValueError(f"a message must have a role of {', '.join(ROLES)} and a text as content, got {message}")
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(NEEDS_EXTRA) from error
    # A template is a program that comes with a download: it runs where it can reach nothing. The options and functions
    # are those that Hugging Face promises to templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    values: dict[str, Any] = {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
    try:
        return environment.from_string(tokenizer.chat_template).render(**tokenizer.names, **values)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refused the conversation: {error}") from error


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
