"""The main figures of the results in a folder, a few lines each: what one reads on a terminal."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

ALSO = ("minutes", "errors", "samples", "rounds", "tap_us_p50", "tap_us_p99", "complete", "machine")
BEGINNINGS = ("pack_", "synthetic_pack_")
ENDINGS = ("_ratio", "_per_s", "_p50", "_p99", "_whole", "_findings", "_dropped", "_s", "_gib")


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        print(f"-- {path.name}")
        for name, value in json.loads(path.read_text()).items():
            if name in ALSO or name.startswith(BEGINNINGS) or name.endswith(ENDINGS):
                print(f"   {name}: {json.dumps(value)[:200]}")
    junit = folder / "junit.xml"
    if junit.exists():
        suite = next(ElementTree.parse(junit).getroot().iter("testsuite")).attrib
        counts = (f"{suite[name]} {name}" for name in ("tests", "failures", "errors", "skipped"))
        print("-- junit.xml:", ", ".join(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
