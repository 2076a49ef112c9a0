"""What to install where something is missing: a plain install looks at archives, and extras of it build and tune them.

Imports nothing.
"""


def to_install(extra: str = "") -> str:
    """The command that installs this distribution with one of its extras; with none of them where there is no `extra`.

    Of a checkout or of a wheel, whichever a user has: no index has a release.
    """
    words = f"[{extra}]" if extra else ""
    return f"pip install '.{words}' in a checkout of cute-aot, or pip install 'WHEEL{words}' where WHEEL is its wheel"
