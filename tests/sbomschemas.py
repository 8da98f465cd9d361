"""Validates bills of materials against the official schemas, in an environment of its own (`make sbom-tools`).

    .venv/sbom/bin/python tests/sbomschemas.py FILE|DIRECTORY…

CycloneDX: the JSON schema of version 1.6, which cyclonedx-python-lib ships, with unknown fields as errors. SPDX: the
rules of the specification 2.3 that spdx-tools implements. Prints each problem; the exit code is 1 if there is one.
"""

import sys
from collections.abc import Iterator
from pathlib import Path


def cyclonedx(file: Path) -> Iterator[str]:
    from cyclonedx.schema import SchemaVersion  # pyright: ignore
    from cyclonedx.validation.json import JsonStrictValidator  # pyright: ignore

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(file.read_text()):
        yield str(error)[:1000]


def spdx(file: Path) -> Iterator[str]:
    from spdx_tools.spdx.model.document import Document  # pyright: ignore
    from spdx_tools.spdx.parser.error import SPDXParsingError  # pyright: ignore
    from spdx_tools.spdx.parser.parse_anything import parse_file  # pyright: ignore
    from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document  # pyright: ignore

    try:
        document = parse_file(str(file))
    except SPDXParsingError as error:
        yield from error.get_messages()
        return
    assert isinstance(document, Document)
    yield from (each.validation_message for each in validate_full_spdx_document(document, "SPDX-2.3"))


CHECKS = {".cdx.json": cyclonedx, ".spdx.json": spdx}


def main() -> int:
    count = failed = 0
    for path in map(Path, sys.argv[1:]):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            check = next((check for suffix, check in CHECKS.items() if file.name.endswith(suffix)), None)
            if check is None:
                continue
            count += 1
            for problem in check(file):
                failed += 1
                print(f"{file}: {problem}")
    print(f"{count} documents, {failed} problems")
    return bool(failed) or not count


if __name__ == "__main__":
    sys.exit(main())
