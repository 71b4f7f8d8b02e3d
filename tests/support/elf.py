"""The dynamic section of a shared library for Linux."""

from __future__ import annotations

import io
from typing import NamedTuple

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection


class Symbol(NamedTuple):
    name: str
    version: str  # such as GLIBC_2.17; empty if it has none
    weak: bool  # may be missing


class Library(NamedTuple):
    needed: list[str]  # the libraries that the loader opens first
    undefined: list[Symbol]
    defined: list[str]


def read(data: bytes) -> Library:
    """Read the bytes of a shared library."""
    elf = ELFFile(io.BytesIO(data))
    needed, undefined, defined = [], [], []
    versions = _versions(elf)
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            needed = [tag.needed for tag in section.iter_tags("DT_NEEDED")]
        elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
            for number, symbol in enumerate(section.iter_symbols()):
                if symbol["st_shndx"] != "SHN_UNDEF":
                    defined.append(symbol.name)
                elif symbol.name:
                    weak = symbol["st_info"]["bind"] == "STB_WEAK"
                    undefined.append(Symbol(symbol.name, versions.get(number, ""), weak))
    return Library(needed, undefined, defined)


def _versions(elf: ELFFile) -> dict[int, str]:
    """Return the wanted versions of symbols by their numbers in .dynsym."""
    names = {}
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, wanted in section.iter_versions():
                names.update({version["vna_other"]: version.name for version in wanted})
    for section in elf.iter_sections():
        if isinstance(section, GNUVerSymSection):
            places = (symbol["ndx"] for symbol in section.iter_symbols())
            return {n: names[place] for n, place in enumerate(places) if place in names}
    return {}
