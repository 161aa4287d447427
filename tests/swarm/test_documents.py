import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triscale.config import ConfigError
from triscale.swarm.tools import DocumentIndex, document_tools
from triscale.swarm.tools.documents import html_text, passages
from triscale.swarm.types import Outcome, ToolContext

CONTEXT = ToolContext(agent="main", call="main#1.0")


def pdf(text: str) -> bytes:
    """The smallest PDF with one line of text."""
    stream = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]  # fmt: skip
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 5\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % p for p in places)
    return out + b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start


@pytest.fixture
def folder(tmp_path):
    docs = tmp_path / "docs"
    (docs / "sub").mkdir(parents=True)
    (docs / "a.md").write_text("# Alpha station\n\nThe keel was laid in 1931 by Brandt.\n")
    (docs / "b.txt").write_bytes(b"Beta station was closed in 1950. caf\xe9")
    (docs / "sub" / "c.html").write_text(
        "<html><head><title>Gamma &amp; co</title><style>p{}</style></head><body><nav>menu</nav>"
        "<p>Gamma station<br>opened 1977</p><script>var hidden</script><table><tr><td>x<td>y</table></body></html>"
    )
    (docs / "d.pdf").write_bytes(pdf("Delta station holds 42 sledges"))
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (docs / "picture.png").write_bytes(b"\x89PNG")
    (docs / ".hidden.txt").write_text("secret keel")
    outside = tmp_path / "outside.txt"
    outside.write_text("outside keel")
    os.symlink(outside, docs / "link.txt")
    return docs


def test_all_formats_are_found_and_broken_files_named(folder):
    index = DocumentIndex.from_folder(folder)
    assert index.names() == ["a.md", "b.txt", "d.pdf", "sub/c.html"]
    assert list(index.problems) == ["broken.pdf"]
    assert [h.document for h in index.search("sledges")] == ["d.pdf"]
    assert [h.document for h in index.search("keel laid")] == ["a.md"]
    assert index.search("opened 1977")[0].title == "Gamma & co"
    assert not index.search("menu") and not index.search("hidden")
    assert "caf�" in index.text("b.txt")


def test_words_together_come_before_single_words():
    index = DocumentIndex({"one": "red apple " * 5, "two": "red pear", "three": "green pear"})
    assert index.search("red pear", 3)[0].document == "two"
    assert {h.document for h in index.search("red pear", 3)} == {"one", "two", "three"}
    assert len(index.search("red pear", 1)) == 1


def test_a_persistent_index_follows_the_folder(folder, tmp_path):
    path = tmp_path / "index.sqlite"
    first = DocumentIndex.from_folder(folder, path=path)
    first.close()
    (folder / "a.md").unlink()
    (folder / "new.md").write_text("Epsilon station")
    os.utime(folder / "b.txt", (1, 1))
    (folder / "b.txt").write_text("Beta moved")
    index = DocumentIndex.from_folder(folder, path=path)
    assert index.names() == ["b.txt", "d.pdf", "new.md", "sub/c.html"]
    assert not index.search("keel") and index.search("moved") and len(index.search("Beta")) == 1


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="not a folder"):
        DocumentIndex.from_folder(tmp_path / "none")


def test_search_and_open_tools(folder):
    search, open_ = document_tools(folder, page_chars=20)

    async def go():
        found = await search.call({"query": "keel", "limit": 2}, CONTEXT)
        assert found.evidence == ("a.md",) and "1931" in found.content
        nothing = await search.call({"query": "zebra"}, CONTEXT)
        assert nothing.outcome is Outcome.COMPLETED and "no document matches" in nothing.content
        page = await open_.call({"document": "a.md"}, CONTEXT)
        assert page.evidence == ("a.md",) and "open with offset=20" in page.content
        text, offset = "", 0
        while offset < len(DocumentIndex.from_folder(folder).text("a.md")):
            piece = await open_.call({"document": "a.md", "offset": offset}, CONTEXT)
            text += piece.content.split("\n[")[0]
            offset += 20
        assert text == (folder / "a.md").read_text()
        wrong = await open_.call({"document": "c.html"}, CONTEXT)
        assert wrong.outcome is Outcome.FAILED and "sub/c.html" in wrong.content
        end = await open_.call({"document": "a.md", "offset": 9999}, CONTEXT)
        assert end.outcome is Outcome.FAILED
        bad = await search.call({"query": "x", "limit": 500}, CONTEXT)
        assert bad.outcome is Outcome.FAILED and "limit" in bad.content

    asyncio.run(go())
    assert search.parameters["required"] == ["query"]


@given(st.text(max_size=60))
def test_no_query_is_a_syntax_error(query):
    DocumentIndex({"a": "some words AND NOT NEAR others"}).search(query)


@given(st.lists(st.text(st.sampled_from("ab \n\t"), max_size=400), max_size=4))
def test_passages_cover_the_text_in_order(parts):
    text = "\n\n".join(parts)
    found = list(passages(text, words=5))
    assert [w for _, p in found for w in p.split()] == text.split()
    assert all(text[start:].lstrip("\n").startswith(p.lstrip("\n")) for start, p in found)


def test_an_unclosed_element_does_not_swallow_the_page():
    assert html_text("<nav><svg></nav>seen") == ("", "seen")


def test_a_document_that_broke_is_no_longer_found(folder, tmp_path):
    path = tmp_path / "index.sqlite"
    DocumentIndex.from_folder(folder, path=path).close()
    (folder / "d.pdf").write_bytes(b"%PDF-1.4 torn")
    index = DocumentIndex.from_folder(folder, path=path)
    assert "d.pdf" in index.problems and not index.search("sledges") and "d.pdf" not in index.names()


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from(["red", "blue", "green"]), max_size=3)), max_size=8
    )
)
def test_the_index_holds_the_last_version_of_each_document(changes):
    index, truth = DocumentIndex(), {}
    for name, words in changes:
        if words:
            truth[name] = set(words)
            index.add(name, " ".join(words))
        else:
            truth.pop(name, None)
            index.remove(name)
    for word in ("red", "blue", "green"):
        assert {h.document for h in index.search(word)} == {n for n, words in truth.items() if word in words}


def test_reading_a_large_folder_says_how_far_it_is(folder, monkeypatch, capsys):
    ticks = iter(range(0, 1000, 3))
    monkeypatch.setattr("triscale.swarm.tools.documents.time.monotonic", lambda: next(ticks))
    DocumentIndex.from_folder(folder)
    assert "documents after" in capsys.readouterr().err
