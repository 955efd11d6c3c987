"""README.zh-CN.md says what README.md says: code, tables, links, numbers, in Chinese."""

import re
from collections import Counter

import pytest
from conftest import ROOT

ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()

WORDS = "results/timings/words.md"  # generated English prose; the Chinese page links instead
GENERATED = re.compile(r"<!-- ((\w+) .+?) -->\n(.*?)<!-- /\2 -->\n", re.DOTALL)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(^|\s+)#.*", re.MULTILINE)
LINK = re.compile(r"\[[^]]*\]\(([^)]+)\)")
CODE = re.compile(r"`([^`]+)`")
HEADING = re.compile(r"^(#+) .*\n", re.MULTILINE)
HAN = re.compile(r"[\u4e00-\u9fff]")


def written(page: str) -> str:
    """The page without what is generated and without fenced blocks."""
    return FENCED.sub("", GENERATED.sub("", page))


def alike(english: str) -> str:
    """The English page with the two links that the Chinese page has in its own way."""
    link = "[report.md](results/timings/report.md)\n"
    page = re.sub(
        f"<!-- file {WORDS} -->.*one file a run\\.\n", link, english, flags=re.S
    )
    return page.replace("(README.zh-CN.md)", "(README.md)", 1)


def headings(page: str) -> list[str]:
    """Their levels, as runs of #."""
    return HEADING.findall(written(page))


def sections(page: str) -> list[str]:
    """The text below each heading, without the heading."""
    return HEADING.split(written(page))[2::2]


def prose(text: str) -> str:
    """Without code and without the targets of links."""
    return CODE.sub("", re.sub(r"\]\([^)]+\)", "]", text))


def code(text: str) -> set[str]:
    """What stands between backticks, line breaks aside."""
    return {" ".join(span.split()) for span in CODE.findall(text)}


def numbers(text: str) -> Counter[str]:
    """Numbers as they are written: 1,797, 25.05, and the 2 of O2."""
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", prose(text)))


def tables(text: str) -> list[tuple[int, ...]]:
    """The number of columns of each row of each table."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        tuple(CODE.sub("", row).count("|") - 1 for row in table.splitlines())
        for table in found
    ]


def test_headings_are_the_same_in_number_and_level():
    assert headings(CHINESE) == headings(ENGLISH)
    assert len(headings(CHINESE)) > 15


def test_fenced_blocks_are_the_same_but_for_comments_in_bash():
    def blocks(page: str) -> list[tuple[str, str]]:
        return [
            (language, COMMENT.sub("", text) if language == "bash" else text)
            for language, text in FENCED.findall(GENERATED.sub("", page))
        ]

    assert blocks(CHINESE) == blocks(ENGLISH)
    assert len(blocks(CHINESE)) >= 4


def test_generated_parts_are_the_same():
    english, chinese = (GENERATED.findall(page) for page in (ENGLISH, CHINESE))
    assert chinese == [part for part in english if part[0] != f"file {WORDS}"]
    assert len(chinese) >= 13
    for page, parts in ((ENGLISH, english), (CHINESE, chinese)):
        assert page.count("<!--") == 2 * len(parts)  # none left open


@pytest.mark.parametrize("number", range(len(headings(ENGLISH))))
def test_sections_have_the_same_tables_links_code_and_numbers(number):
    english, chinese = (sections(page)[number] for page in (alike(ENGLISH), CHINESE))
    assert tables(chinese) == tables(english)
    assert Counter(LINK.findall(chinese)) == Counter(LINK.findall(english))
    assert code(chinese) == code(english)
    missing = numbers(english) - numbers(chinese)
    assert not missing, f"numbers that the Chinese section lacks: {missing}"


def test_no_english_prose_is_left():
    for line in written(CHINESE).splitlines():
        text = prose(line)
        if line.startswith(("|", "#")):  # a name alone may be all there is to say
            for cell in text.split("|"):
                assert HAN.search(cell) or not re.search(r"[a-z]{2} [a-z]{2}", cell), (
                    line
                )
        else:
            assert HAN.search(text) or not text.strip(), line
        text = re.sub("（.*?）", "", text)  # the English term at its first use
        assert not re.search(r"([a-z]{2,},? ){2}[a-z]{2,}", text), line
    for language, text in FENCED.findall(GENERATED.sub("", CHINESE)):
        for comment in COMMENT.finditer(text) if language == "bash" else ():
            words = re.search(r"[a-z]{2,} [a-z]{2,}", comment[0])
            assert HAN.search(comment[0]) or not words, comment[0]


def test_lines_break_where_a_space_does_not_show():
    """A line break is shown as a space: not one inside a Chinese sentence."""
    lines = written(CHINESE).splitlines()
    for line, following in zip(lines, lines[1:], strict=False):
        inside = re.match(r" *[^\s|#>*\d-]", following) and line.strip()
        assert not inside or line.endswith(("。", "？", "：", "；")), line


def test_bold_text_is_shown_as_bold():
    """In Markdown, punctuation inside ** next to a character outside keeps the stars."""
    bold = re.findall(r"(^|.)\*\*(.+?)\*\*($|.)", written(CHINESE), re.MULTILINE)
    assert len(bold) > 20
    for before, text, after in bold:
        assert not (HAN.match(after) and re.search(r"[^\w\s]$", text)), text
        assert not (HAN.match(before) and re.match(r"[^\w\s]", text)), text
