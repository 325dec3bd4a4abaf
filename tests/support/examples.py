"""Number of hypothesis examples per property: a quarter of them in ``make test``, all of them in ``make test-long``."""

from collections.abc import Iterable

from hypothesis import HealthCheck, settings

LONG = "long"  # the hypothesis profile of `make test-long`
_SHARE = 4

settings.register_profile(LONG)


def examples(num: int, *, derandomize: bool = True, suppress: Iterable[HealthCheck] = ()) -> settings:
    """Return the settings for a property with ``num`` examples, the same in every run if ``derandomize``."""
    is_long = settings.get_current_profile_name() == LONG
    return settings(
        max_examples=num if is_long else -(-num // _SHARE),
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=list(suppress),
    )
