"""Compile time: capture, analysis, planning and lowering. Never touches a stream, a file or a process group."""

if __name__ != "zinf_compile.passes":
    raise ImportError(
        f"this folder is the package 'zinf_compile.passes', but it was imported as {__name__!r}; "
        "a second copy of its classes would not be equal to the first: import zinf_compile.passes"
    )
