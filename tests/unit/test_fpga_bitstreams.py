"""GBS and AOCX files: parsing, and messages for invalid files."""

import gzip
import os
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from bitstreams import GBS_MAGIC, HASH, INTERFACE, NLB0, NLB3, aocx, elf, gbs, metadata
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import write

from accelplane.fpga import FpgaError
from accelplane.fpga.aocx import unpack
from accelplane.fpga.bitstream import Bitstream, extra, open_bitstream
from accelplane.fpga.elf import ElfError, Window, sections
from accelplane.fpga.gbs import HEAD_LIMIT, parse

hostile = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def put(directory: Path, name: str, content: bytes) -> str:
    return str(write(directory / name, content))


class TestGbs:
    def test_ids_and_contents_are_read(self, tmp_path: Path) -> None:
        text = metadata("69528DB6-eb31-577a-8c36-68f9faa081f6", f" {NLB0.upper()}\n")
        with open_bitstream(put(tmp_path, "nlb0.gbs", gbs(text, b"raw bits"))) as bitstream:
            assert bitstream.interface == INTERFACE
            assert bitstream.accelerator == bitstream.unique == NLB0
            assert bitstream.read().tobytes() == b"raw bits"
            assert extra(bitstream) == {"Size": "8"}
            assert bitstream.extension == ".gbs"
            assert bitstream.programmable

    def test_a_gbs_file_has_the_documented_layout(self) -> None:
        head = bytes.fromhex("58656f6e46504741 b747425376303031 10000000".replace(" ", ""))
        text = b'{"afu-image":{}}'
        assert head[:16] == GBS_MAGIC
        with pytest.raises(FpgaError, match="0 accelerator clusters"):
            parse(head + text, "x")

    @pytest.mark.parametrize("length", [1, 100, 4095])
    def test_metadata_may_have_up_to_4095_bytes(self, tmp_path: Path, length: int) -> None:
        text = metadata().ljust(length, b" ")[: max(length, len(metadata()))]
        with open_bitstream(put(tmp_path, "x.gbs", gbs(text))) as bitstream:
            assert bitstream.read().tobytes() == b"the bitstream"

    @pytest.mark.parametrize(
        "text",
        [
            metadata() + b"\0\0\0",
            metadata() + b'{"afu-image": 1}',
            b"\n\t " + metadata(),
            metadata(power="a lot", **{"magic-no": {}, "clock-frequency-high": [], "afu-top-interface": 3}),
            metadata().replace(b'"version": 1', b'"version": "one"'),
            metadata(name="\udcff").replace(b"\\udcff", b"\xff"),
        ],
        ids=["zeros behind", "more JSON behind", "white space", "types nobody reads", "version", "no UTF-8"],
    )
    def test_unknown_metadata_is_ignored(self, tmp_path: Path, text: bytes) -> None:
        with open_bitstream(put(tmp_path, "x.gbs", gbs(text))) as bitstream:
            assert (bitstream.interface, bitstream.accelerator) == (INTERFACE, NLB0)

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "0 bytes, expected a GBS header of 20"),
            (gbs()[:19], "19 bytes, expected a GBS header of 20"),
            (b"x" + gbs()[1:], r"begins with 78 65 6f .*, expected 58 65 6f 6e .* \(GBS\)"),
            (gbs(length=0), "0 bytes of metadata, expected 1 to 4095"),
            (gbs(length=4096), "4096 bytes of metadata, expected 1 to 4095"),
            (gbs(length=2**32 - 1), "4294967295 bytes of metadata"),
            (gbs(length=4000), "truncated in the metadata"),
            (gbs(b"{"), "invalid JSON in the metadata"),
            (gbs(b"[" * 4000), "invalid JSON in the metadata"),
            (gbs(b"   "), "invalid JSON in the metadata"),
            (gbs(b"[]"), "expected a JSON object"),
            (gbs(b"{}"), "no object afu-image in the metadata"),
            (gbs(b'{"afu-image": []}'), "no object afu-image in the metadata"),
            (gbs(b'{"afu-image": {}}'), "0 accelerator clusters in the metadata, expected 1"),
            (gbs(b'{"afu-image": {"accelerator-clusters": [{}, {}]}}'), "2 accelerator clusters"),
            (gbs(metadata(7)), "interface-uuid in the metadata is '7', expected a string"),
            (gbs(metadata(afu=["x" * 500])), "accelerator-type-uuid in the metadata is .{60,90}, expected a string"),
            (gbs(raw=b""), "no bitstream after the metadata"),
        ],
    )
    def test_broken_files_are_rejected(self, tmp_path: Path, content: bytes, problem: str) -> None:
        path = put(tmp_path, "broken.gbs", content)
        with pytest.raises(FpgaError, match=problem) as caught, open_bitstream(path):
            pass
        assert str(caught.value).startswith(path)

    @pytest.mark.parametrize("text", [b'{"afu-image": {"accelerator-clusters": [{}]}}', metadata("", "")])
    def test_a_file_may_have_no_ids(self, tmp_path: Path, text: bytes) -> None:
        with open_bitstream(put(tmp_path, "x.gbs", gbs(text))) as bitstream:
            assert (bitstream.interface, bitstream.unique) == ("", "")

    def test_a_bitstream_larger_than_any_card_is_rejected(self, tmp_path: Path) -> None:
        path = put(tmp_path, "x.gbs", gbs())
        os.truncate(path, 1 << 40)
        with pytest.raises(FpgaError, match="at most 536870912"), open_bitstream(path):
            pass

    def test_a_file_truncated_while_it_is_read_is_detected(self, tmp_path: Path) -> None:
        path = put(tmp_path, "x.gbs", gbs())
        with open_bitstream(path) as bitstream:
            os.truncate(path, len(gbs()) - 1)
            with pytest.raises(FpgaError, match="was truncated"):
                bitstream.read()

    @hostile
    @given(st.binary(max_size=200), st.binary(max_size=20), st.one_of(st.none(), st.integers(0, 2**32 - 1)))
    def test_any_bytes_are_parsed_or_rejected(self, text: bytes, raw: bytes, length: int | None) -> None:
        try:
            found = parse(gbs(text, raw, length=length)[:HEAD_LIMIT], "x")
        except FpgaError as error:
            refused = str(error)
            assert refused.startswith("x: ")
            return
        assert 20 < found.offset <= HEAD_LIMIT

    @hostile
    @given(data=st.data())
    def test_any_change_of_a_valid_file_is_parsed_or_rejected(self, data: st.DataObject, tmp_path: Path) -> None:
        content = bytearray(gbs())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path = put(tmp_path, "x.gbs", bytes(content[: data.draw(st.integers(0, len(content)))]))
        outcome = read_or_refuse(path)
        assert outcome is None or outcome


class TestAocx:
    def test_ids_and_contents_are_read(self, tmp_path: Path) -> None:
        design = gbs(metadata(afu=NLB3), b"raw bits")
        with open_bitstream(put(tmp_path, "x.aocx", aocx(design))) as bitstream:
            assert bitstream.interface == INTERFACE
            assert bitstream.accelerator == NLB3
            assert bitstream.unique == HASH
            assert bitstream.read().tobytes() == b"raw bits"
            assert extra(bitstream) == {
                "Board": "pac_a10",
                "Target": "fpga",
                "Hash": HASH,
                "Version": "19.4",
                "Size": "8",
            }

    def test_large_designs_are_decompressed_unchanged(self, tmp_path: Path) -> None:
        raw = random.Random(1).randbytes(300_000) + bytes(2_000_000)  # noqa: S311 - any bytes that don't pack
        with open_bitstream(put(tmp_path, "x.aocx", aocx(gbs(raw=raw)))) as bitstream:
            assert bitstream.size() == len(raw)
            assert bitstream.read().tobytes() == raw

    def test_without_a_design_only_texts_are_read(self, tmp_path: Path) -> None:
        with open_bitstream(put(tmp_path, "x.aocx", elf({".acl.board": b"pac_a10\0"}))) as bitstream:
            assert (bitstream.interface, bitstream.accelerator, bitstream.unique) == ("", "", "")
            assert extra(bitstream) == {"Board": "pac_a10", "Target": "", "Hash": "", "Version": ""}
            for method in (bitstream.read, bitstream.size):
                with pytest.raises(FpgaError, match=r"no section \.acl\.fpga\.bin, expected"):
                    method()

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "is empty, expected an ELF file"),
            (gbs(), r"begins with 58 65 6f 6e 46 50, expected 7f 45 4c 46 .*\(ELF\)"),
            (aocx()[:50], "the file is incomplete"),
            (aocx()[:-100], "the file is incomplete"),
            (elf({".acl.fpga.bin": b""}), r"its section \.acl\.fpga\.bin is empty, expected an ELF file"),
            (elf({".acl.fpga.bin": elf({})}), r"its section \.acl\.fpga\.bin has no section \.acl\.gbs\.gz"),
            (elf({".acl.fpga.bin": elf({".acl.gbs.gz": b"x" * 40})}), "gbs.gz cannot be unpacked: .*header"),
            (elf({".acl.fpga.bin": elf({".acl.gbs.gz": b""})}), "gbs.gz ends early"),
            (elf({".acl.fpga.bin": elf({".acl.gbs.gz": gzip.compress(gbs())[:-9]})}), "gbs.gz ends early"),
            (
                elf({".acl.fpga.bin": elf({".acl.gbs.gz": gzip.compress(gbs()) + b"\0"})}),
                "data after the end of the gzip member",
            ),
            (
                elf({".acl.fpga.bin": elf({".acl.gbs.gz": gzip.compress(gbs()) * 2})}),
                "data after the end of the gzip member",
            ),
            (aocx(gbs(raw=b"")), r"\.gz\): no bitstream after the metadata"),
            (aocx(b"no GBS file at all....."), r"x\.aocx \(\.acl\.gbs\.gz\): begins with 6e 6f"),
            (aocx(board="x" * 70_000), r"its section \.acl\.board has 70000 bytes, expected at most 65536"),
            (elf({".acl.board": b"x"}, flags=0x800), r"section \.acl\.board is compressed"),
        ],
    )
    def test_broken_files_are_rejected(self, tmp_path: Path, content: bytes, problem: str) -> None:
        path = put(tmp_path, "x.aocx", content)
        with pytest.raises(FpgaError, match=problem) as caught, open_bitstream(path):
            pass
        assert str(caught.value).startswith(path)

    def test_a_damaged_design_is_detected_when_it_is_read(self, tmp_path: Path) -> None:
        packed = bytearray(gzip.compress(gbs(raw=random.Random(1).randbytes(600_000))))  # noqa: S311
        packed[-6] ^= 1
        with open_bitstream(
            put(tmp_path, "x.aocx", elf({".acl.fpga.bin": elf({".acl.gbs.gz": bytes(packed)})}))
        ) as bitstream:
            for method in (bitstream.read, bitstream.size):
                with pytest.raises(FpgaError, match=r"x\.aocx: its section \.acl\.gbs\.gz cannot be unpacked"):
                    method()

    def test_decompression_is_limited(self, tmp_path: Path) -> None:
        packer = zlib.compressobj(1, wbits=31)
        head = packer.compress(gbs(raw=b"")) + packer.flush(zlib.Z_FULL_FLUSH)
        # The data between two full flushes may be repeated: 4 MB of zeros, 129 times.
        packed = head + 129 * (packer.compress(bytes(4 * 1024 * 1024)) + packer.flush(zlib.Z_FULL_FLUSH))
        path = put(tmp_path, "bomb", packed)
        with Path(path).open("rb") as file, pytest.raises(ElfError, match="unpacks to more than 536870912"):
            for _piece in unpack(Window(file.fileno(), 0, len(packed))):
                pass

    @hostile
    @given(data=st.data())
    def test_any_change_of_a_valid_file_is_parsed_or_rejected(self, data: st.DataObject, tmp_path: Path) -> None:
        content = bytearray(aocx())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path = put(tmp_path, "x.aocx", bytes(content[: data.draw(st.integers(0, len(content)))]))
        outcome = read_or_refuse(path)
        assert outcome is None or outcome

    @hostile
    @given(packed=st.binary(max_size=400))
    def test_any_compressed_bytes_are_parsed_or_rejected(self, packed: bytes, tmp_path: Path) -> None:
        path = put(tmp_path, "x.aocx", elf({".acl.fpga.bin": elf({".acl.gbs.gz": packed})}))
        assert read_or_refuse(path) is None


def read_or_refuse(path: str) -> bytes | None:
    """The bitstream, None if the file was rejected with its name."""
    try:
        with open_bitstream(path) as bitstream:
            found: Bitstream = bitstream
            return found.read().tobytes()
    except FpgaError as error:
        message = str(error)
    assert message.startswith(path)
    return None


class TestElf:
    @pytest.mark.parametrize("bits", [32, 64])
    @pytest.mark.parametrize("order", ["<", ">"])
    def test_sections_of_every_class_and_byte_order_are_found(self, tmp_path: Path, bits: int, order: str) -> None:
        content = elf({".one": b"first", ".two": b"second", ".three": b""}, bits=bits, order=order)
        with Path(put(tmp_path, "x", content)).open("rb") as file:
            found = sections(Window(file.fileno(), 0, len(content)), (".two", ".three", ".four"))
            texts = {name: section.read(0, section.size) for name, section in found.items()}
        assert texts == {".two": b"second", ".three": b""}

    def test_the_interpreter_of_a_real_program_is_read(self) -> None:
        program = Path(sys.executable).resolve()
        with program.open("rb") as file:
            found = sections(Window(file.fileno(), 0, program.stat().st_size), (".interp", ".bss"))
            if ".interp" not in found:
                pytest.skip("this Python is linked statically")
            interpreter = found[".interp"].read(0, found[".interp"].size).rstrip(b"\0").decode()
        assert Path(interpreter).exists()
        assert set(found) == {".interp"}  # .bss takes no room in the file

    @pytest.mark.parametrize(
        ("at", "value", "problem"),
        [
            (4, b"\x03", "expected 7f 45 4c 46 and class and byte order"),
            (40, struct.pack("<Q", 2**63), "the file is incomplete"),
            (58, struct.pack("<H", 8), "invalid section table"),
            (58, struct.pack("<H", 65535), "invalid section table"),
            (60, struct.pack("<H", 65535), "65535 sections of"),
            (62, struct.pack("<H", 9), "names in section 9"),
        ],
    )
    def test_invalid_tables_are_rejected(self, tmp_path: Path, at: int, value: bytes, problem: str) -> None:
        content = bytearray(elf({".one": b"first"}))
        content[at : at + len(value)] = value
        with (
            Path(put(tmp_path, "x", bytes(content))).open("rb") as file,
            pytest.raises(ElfError, match=problem),
        ):
            sections(Window(file.fileno(), 0, len(content)), (".one",))

    def test_only_requested_section_names_are_read(self, tmp_path: Path) -> None:
        count = 4096
        header = elf({})[:40] + struct.pack("<Q", 64) + elf({})[48:60] + struct.pack("<2H", count, 0)
        entry = struct.pack("<2I4Q2I2Q", 0, 1, 0, 0, 64 + 64 * count, 1 << 20, 0, 0, 1, 0)
        content = header + entry * count + b"\xff" * ((1 << 20) - 1) + b"\0"
        with Path(put(tmp_path, "x", content)).open("rb") as file:
            assert sections(Window(file.fileno(), 0, len(content)), (".one",)) == {}

    def test_a_file_without_sections_returns_no_sections(self, tmp_path: Path) -> None:
        content = bytearray(elf({".one": b"first"}))
        content[60:62] = b"\0\0"
        with Path(put(tmp_path, "x", bytes(content))).open("rb") as file:
            assert sections(Window(file.fileno(), 0, len(content)), (".one",)) == {}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("x.bit", r"extension '\.bit', expected \.gbs or \.aocx"), ("x", "extension ''"), ("none.gbs", "No such file")],
)
def test_other_files_are_rejected(tmp_path: Path, name: str, problem: str) -> None:
    if not name.startswith("none"):
        write(tmp_path / name, gbs())
    with pytest.raises(FpgaError, match=problem), open_bitstream(str(tmp_path / name)):
        pass


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gbs")
    (tmp_path / "directory.gbs").mkdir()
    for name in ("fifo.gbs", "directory.gbs"):
        with pytest.raises(FpgaError, match="not a regular file"), open_bitstream(str(tmp_path / name)):
            pass
    with pytest.raises(FpgaError, match="null"), open_bitstream("a\0b.gbs"):
        pass


def test_messages_about_unusual_file_names_have_one_line() -> None:
    with pytest.raises(FpgaError) as caught, open_bitstream("/a\n\x1b[1m\udcff\u00e9.gbs"):
        pass
    assert str(caught.value) == "/a\\n\\x1b[1m\\udcff\u00e9.gbs: No such file or directory"


def test_a_bitstream_larger_than_memory_is_reported(tmp_path: Path) -> None:
    path = put(tmp_path, "x.gbs", gbs())
    os.truncate(path, 500 << 20)
    code = (
        "import resource, sys; from accelplane.fpga import FpgaError\n"
        "from accelplane.fpga.bitstream import open_bitstream\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
        "with open_bitstream(sys.argv[1]) as bitstream:\n"
        "    try: bitstream.read()\n"
        "    except FpgaError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"{path}: not enough memory")
