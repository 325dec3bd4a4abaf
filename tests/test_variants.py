"""The variants of a long test that `make test-long` runs."""

import itertools

from tests.support.variants import choose_variants


def test_each_value_of_each_parameter_occurs() -> None:
    models, placements, ways = ("mlp", "gpt", "bert", "vit"), ("host", "nvme", "mixed"), ("aten", "inductor")
    variants = {
        f"test[{model}-{placement}-{way}]": {"model": model, "placement": placement, "way": way}
        for model, placement, way in itertools.product(models, placements, ways)
    }
    chosen = choose_variants(variants)
    assert len(chosen) < len(variants) / 2
    for parameter, values in (("model", models), ("placement", placements), ("way", ways)):
        assert {variants[name][parameter] for name in chosen} == set(values)


def test_a_test_of_one_parameter_keeps_all_of_its_variants() -> None:
    variants = {f"test[{seed}]": {"seed": seed} for seed in range(9)}
    assert set(choose_variants(variants)) == variants.keys()


def test_the_order_in_which_variants_come_does_not_matter() -> None:
    variants = {f"test[{a}-{b}]": {"a": a, "b": b} for a, b in itertools.product(range(4), range(5))}
    assert choose_variants(variants) == choose_variants(dict(reversed(variants.items())))
