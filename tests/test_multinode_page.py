"""docs/multinode.md: its commands and links lead somewhere."""

import re
import shlex

from conftest import ROOT

PAGE = (ROOT / "docs" / "multinode.md").read_text()
SETTINGS = "".join(
    file.read_text() for file in (ROOT / "scripts").iterdir() if file.is_file()
)


def test_commands_use_settings_and_flags_that_exist():
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    commands = [
        shlex.split(line, comments=True)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    assert len(commands) > 10
    flags = "".join(
        (ROOT / name).read_text()
        for name in ("common/arguments.py", "multiprocessing_distributed.py")
    )
    for words in commands:
        script = next(w for w in words if re.fullmatch(r"[^=]+\.(sh|py|sbatch)", w))
        for word in words[: words.index(script)]:
            name, is_setting, _ = word.partition("=")
            if is_setting and name.isupper():
                assert f"{name}=${{{name}:-" in SETTINGS, name
        assert (ROOT / script).exists(), script
        for word in words[words.index(script) + 1 :]:
            if word.startswith("--"):
                assert f'"{word}"' in flags, word


def test_settings_that_the_text_names_exist():
    for name in ("JOIN_SECONDS", "MAX_RESTARTS", "INTERFACE", "SSH_PORT", "NPROC"):
        assert name in PAGE and f"{name}=${{{name}:-" in SETTINGS, name


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) >= 3
    for link in links:
        assert link.startswith("http") or (ROOT / "docs" / link).resolve().exists()
