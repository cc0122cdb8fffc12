"""PTX: reading it (lexer, parser), what it is made of (operands, statements), and writing it again (printer).

The text comes from users' binaries, so nothing in it is trusted: whatever is wrong ends in a PtxError that names the
line. Source of everything about the language: NVIDIA, "PTX ISA" 9.0, mostly the sections "Syntax", "State Spaces,
Types, and Variables", "Instruction Operands" and "Directives"; older versions are subsets of it as far as they reach
here. What the parser does not check is what only an assembler needs: that an opcode exists and its operands fit.
"""
