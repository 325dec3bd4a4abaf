"""Run time: the store, transfers and the streamed step. Never looks at an FX graph except to call it."""

if __name__ != "zinf_compile.runtime":
    raise ImportError(
        f"this folder is the package 'zinf_compile.runtime', but it was imported as {__name__!r}; "
        "a second copy of its classes would not be equal to the first: import zinf_compile.runtime"
    )
