"""``search`` and ``open`` over a folder of documents (or any :class:`DocumentIndex`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..types import Outcome, Tool, ToolResult
from .documents import DocumentIndex, Hit
from .function import FunctionTool

PAGE_CHARS = 6_000
SNIPPET_CHARS = 400


def document_tools(
    source: DocumentIndex | str | Path, *, page_chars: int = PAGE_CHARS, thread: bool = True
) -> list[Tool]:
    """The tools ``search(query, limit)`` and ``open(document, offset)``.

    source: an index, or a folder to index now. page_chars: the most characters one ``open`` returns. thread: search
    off the event loop (False under a virtual clock). The evidence of both is the names of the documents shown.
    """
    index = source if isinstance(source, DocumentIndex) else DocumentIndex.from_folder(source)

    async def run(function: Any, *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments) if thread else function(*arguments)

    async def search(
        query: Annotated[str, Field(description="words to look for")],
        limit: Annotated[int, Field(ge=1, le=20, description="how many documents to return")] = 5,
    ) -> ToolResult:
        """Search the documents for words; returns the best matching documents with a passage of each."""
        hits = await run(index.search, query, limit)
        if not hits:
            return ToolResult(f"no document matches {query!r} (of {len(index)} documents)")
        return ToolResult("\n\n".join(map(_shown, hits)), evidence=tuple(h.document for h in hits))

    async def open_document(
        document: Annotated[str, Field(description="name of the document as search shows it")],
        offset: Annotated[int, Field(ge=0, description="character to start from")] = 0,
    ) -> ToolResult:
        """Read a document, a page at a time."""
        try:
            text = await run(index.text, document)
        except KeyError:
            return ToolResult(_unknown(index, document), Outcome.FAILED)
        page = text[offset : offset + page_chars]
        end = offset + len(page)
        if not page:
            return ToolResult(f"{document} ends at character {len(text)}", Outcome.FAILED)
        if end < len(text):
            page += f"\n[{len(text) - end} more characters: open with offset={end}]"
        return ToolResult(page, evidence=(document,))

    return [FunctionTool(search), FunctionTool(open_document, name="open")]


def _shown(hit: Hit) -> str:
    passage = " ".join(hit.text.split())
    cut = passage if len(passage) <= SNIPPET_CHARS else passage[:SNIPPET_CHARS].rsplit(" ", 1)[0] + " ..."
    return f"[{hit.document}] {hit.title} (character {hit.offset})\n{cut}"


def _unknown(index: DocumentIndex, name: str) -> str:
    near: Sequence[str] = [h.document for h in index.search(name, 3)]
    stem = Path(name).name.casefold()
    near = [n for n in index.names() if Path(n).name.casefold() == stem] or near
    hint = f"; did you mean {', '.join(near[:3])}?" if near else ""
    return f"no document is called {name!r}{hint}"
