"""Checks commit subjects: `area: imperative summary`, at most 72 characters.

commit_messages.py FILE     the message in FILE, as git's commit-msg hook passes it
commit_messages.py          the commits of this branch since the rule holds
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAX_SUBJECT = 72  # characters
FIRST = "b5e8d4a"  # the rule holds for commits after this one
_SUBJECT = re.compile(r"(?:[\w./{},-]+(?: [\w./{},-]+){0,5}): (?P<verb>[a-z][\w-]*)\b")
_ENDINGS = ("ed", "ing", "es", "ts", "ds", "ns", "ks", "rs", "ps", "ls")  # added, adding, fixes, adds, ...
_IMPERATIVES = {"bring", "embed", "feed", "need", "proceed", "seed", "speed", "shed"}


def problem(subject: str) -> str | None:
    """Returns what is wrong with a subject, if anything is."""
    if len(subject) > MAX_SUBJECT:
        return f"has {len(subject)} characters; the limit is {MAX_SUBJECT}"
    match = _SUBJECT.match(subject)
    if match is None:
        return 'does not have the form "area: imperative summary"'
    verb = match["verb"]
    if verb.endswith(_ENDINGS) and verb not in _IMPERATIVES:
        return f'starts its summary with {verb!r}, which is no imperative; write "add", not "added" or "adds"'
    return None


def main(arguments: list[str]) -> int:
    if arguments:
        subjects = [Path(arguments[0]).read_text().partition("\n")[0]]
        if subjects[0].startswith(("Merge ", "fixup! ", "squash! ")):
            return 0
    else:
        ancestry = ["git", "merge-base", "--is-ancestor", FIRST, "HEAD"]
        known = subprocess.run(ancestry, capture_output=True, check=False).returncode == 0
        commits = f"{FIRST}..HEAD" if known else "-1"  # a shallow clone has only the last commit
        log = subprocess.check_output(["git", "log", "--no-merges", "--format=%s", commits], text=True)
        subjects = log.splitlines()
    found = [f"{subject!r} {what}" for subject in subjects if (what := problem(subject)) is not None]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
