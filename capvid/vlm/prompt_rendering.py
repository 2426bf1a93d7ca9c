"""Rendering of chat templates in a process of its own.

A template is a program by whoever published the model. Jinja's sandbox keeps it from the file system, but not
from loops without end or from gigabytes of text, so it runs where it can be killed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from capvid.errors import CheckpointError, RemoteError
from capvid.utils.validation import GIB, MIB
from capvid.video.worker_pool import WorkerDiedError, WorkerPool

Messages = Sequence[Mapping[str, Any]]
_TIMEOUT = 30.0  # seconds to render, and to start the process for the first one
_MAX_MEMORY = GIB  # address space of the process
_MAX_LENGTH = MIB  # characters of a template, and of all that it renders


def render_prompts(
    path: Path, template: str, chats: Sequence[Messages], tokens: Mapping[str, Any]
) -> list[str]:
    """Return the prompt that a template makes of each chat, up to where the answer begins.

    Args:
        path: file of the template, for errors.
        template: the template.
        chats: messages of each chat.
        tokens: special tokens by name, such as ``bos_token``.

    Raises:
        CheckpointError: the template is no template, fails, or needs too much time or memory.
    """
    reason = "it is longer than a template can be"
    if len(template) <= _MAX_LENGTH:
        call = _pool(os.getpid()).submit(_render, template, list(chats), dict(tokens))
        try:
            return call.result()
        except TimeoutError:
            reason = f"it does not end within {_TIMEOUT:g} seconds"
        except WorkerDiedError as error:
            reason = f"it ended its process, {error}"
        except RemoteError as error:
            reason = "it needs too much memory" if str(error) == "MemoryError" else str(error)
    raise CheckpointError(f"{path}: the chat template fails ({reason})", remedy="choose another model")


@lru_cache(maxsize=1)
def _pool(process: int) -> WorkerPool:
    """Return the pool of this process; after a fork, the child needs one of its own."""
    return WorkerPool(1, timeout=_TIMEOUT)


def start_renderer() -> None:
    """Start the process in the background."""
    _pool(os.getpid()).submit(_render, "", [], {})


def _render(template: str, chats: list[Messages], tokens: dict[str, Any]) -> list[str]:
    """Render a template, in the other process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MAX_MEMORY if soft == resource.RLIM_INFINITY else min(soft, _MAX_MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    function: Any = render_jinja_template  # untyped
    prompts: list[str] = function(chats, chat_template=template, add_generation_prompt=True, **tokens)[0]
    if sum(map(len, prompts)) > _MAX_LENGTH:
        raise MemoryError
    return prompts
