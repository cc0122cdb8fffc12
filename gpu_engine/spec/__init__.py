"""Speculation: from module binaries to which parameter of a kernel reads or writes which buffer (paper §4.1)."""
