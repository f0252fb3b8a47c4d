from __future__ import annotations

import subprocess

from hypothesis import given
from hypothesis import strategies as st

from kvops.launch.shell import command, quote, wrapped

# A shell word holds any character but NUL; surrogates have no bytes.
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def in_shell(text: str, **env: str) -> str:
    done = subprocess.run(
        ["sh", "-c", f"printf %s {text}"], env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, check=True
    )
    return done.stdout.decode()


@given(word=WORDS)
def test_a_shell_gives_back_every_word(word: str) -> None:
    assert in_shell(quote(word)) == word


@given(before=WORDS, after=WORDS)
def test_only_our_own_variables_are_filled_in(before: str, after: str) -> None:
    if after[:1].isalnum() or after[:1] == "_":
        after = "-" + after
    word = f"{before}$ENGINE_ID{after}"
    assert in_shell(quote(word), ENGINE_ID="e1") == word.replace("$ENGINE_ID", "e1")


def test_an_option_stands_on_a_line_with_its_value() -> None:
    parts = command(["python3", "-m", "x", "--port", "1", "--flag", "--name=y"], last='"$@"')
    assert wrapped(parts).splitlines() == [
        "python3 -m x \\", "  --port 1 \\", "  --flag \\", "  --name=y \\", '  "$@"'
    ]  # fmt: skip
