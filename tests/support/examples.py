"""Number of hypothesis examples per property: a quarter of them in ``make test``, all of them in ``make test-long``.

No property fails for being slow: on a shared machine a first example may take seconds.
"""

from collections.abc import Iterable

from hypothesis import HealthCheck, settings

LONG = "long"  # the hypothesis profile of `make test-long`
_SHARE = 4

settings.register_profile(LONG, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", settings.get_profile(LONG))
settings.load_profile("short")  # pytest loads the other one later, if its options name it


def examples(num: int, *, derandomize: bool = True, suppress: Iterable[HealthCheck] = ()) -> settings:
    """Return the settings for a property with ``num`` examples, the same in every run if ``derandomize``."""
    is_long = settings.get_current_profile_name() == LONG
    return settings(
        max_examples=num if is_long else -(-num // _SHARE),
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=[HealthCheck.too_slow, *suppress],
    )
