#!/usr/bin/env python3
"""Adds up test results and prints the closing line of scripts/test.sh: N passed, N failed.

Reads every *.xml (JUnit, of ctest and pytest) and *.count ("passed failed" in text, for what has no
test runner) of a folder. Exit status 1 when anything failed or when nothing passed.
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def of_case(case):
    """passed, failed or skipped. ctest says "notrun" both of a skip and of a missing program."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    if case.get("status") == "notrun" and "SKIP" not in skipped.get("message", "").upper():
        return "failed"
    return "skipped"


def of_file(path):
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    if path.suffix == ".count":
        passed, failed = path.read_text(encoding="utf-8").split()
        totals["passed"], totals["failed"] = int(passed), int(failed)
        return totals
    try:
        cases = ElementTree.parse(path).getroot().iter("testcase")
    except ElementTree.ParseError as e:
        print(f"{path}: {e}: counted as a failure")
        totals["failed"] = 1
        return totals
    for case in cases:
        kind = of_case(case)
        totals[kind] += 1
        if kind != "passed":
            name = " ".join(filter(None, [case.get("classname"), case.get("name")]))
            print(f"{kind.upper()} {path.stem}: {name}")
    return totals


def main():
    folder = pathlib.Path(sys.argv[1])
    files = sorted([*folder.glob("*.xml"), *folder.glob("*.count")])
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for path in files:
        for kind, n in of_file(path).items():
            totals[kind] += n
    line = f"{totals['passed']} passed, {totals['failed']} failed"
    if totals["skipped"]:
        line += f", {totals['skipped']} skipped"
    print(line)
    return 1 if totals["failed"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
