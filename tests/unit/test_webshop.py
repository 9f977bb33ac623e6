"""WebShop: the reward by a table, the pages, the search, the original's files."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.envs.bm25 import BM25, words
from drumroll.envs.builtin import make
from drumroll.envs.rows import play
from drumroll.envs.webshop.catalogue import DEPARTMENTS, Goal, Product, generated
from drumroll.envs.webshop.reward import nouns_in, score, token_set_ratio, type_score
from drumroll.errors import DataError

SHIRT = Product(
    id="a1",
    title="Nova Soft Cotton Shirt",
    price=20.0,
    category=("clothing", "tops", "shirt"),
    query="shirt",
    attributes=("soft", "machine washable"),
    options={"color": ("navy blue", "red"), "size": ("s", "xl")},
    bullets=("Quick dry fabric",),
    description="Made for long summers.",
)
GOAL = Goal(SHIRT, ("machine washable", "quick dry"), ("blue",), 30.0)


def bought(**changes):
    return Product(**{**vars(SHIRT), "id": "b2", **changes})


@pytest.mark.parametrize(
    ("product", "chosen", "reward"),
    [
        (SHIRT, {"color": "navy blue"}, 1.0),
        (SHIRT, {}, 3 / 4),
        (SHIRT, {"color": "red"}, 3 / 4),
        (SHIRT, {"size": "blue"}, 1.0),
        (bought(price=30.0), {"color": "blue"}, 1.0),
        (bought(price=30.01), {"color": "blue"}, 3 / 4),
        (bought(attributes=("washable machine",)), {"color": "blue"}, 1.0),
        (bought(attributes=()), {"color": "blue"}, 3 / 4),
        (bought(attributes=(), bullets=(), price=99.0), {}, 0.0),
        (bought(attributes=(), description="A machine washable thing"), {"color": "blue"}, 1.0),
        (bought(title="Steel Kettle"), {"color": "blue"}, 0.0),
        (bought(title="Steel Kettle Shirt", query="kettle", category=("kitchen",)), {"color": "blue"}, 1.0),
    ],
)
def test_purchases_by_the_formula(product, chosen, reward):
    assert score(product, chosen, GOAL) == pytest.approx(reward)


def thing(title, query="q", category=("a", "b")):
    return bought(title=title, query=query, category=category)


@pytest.mark.parametrize(
    ("wanted", "got", "worth"),
    [
        (thing("lamp"), thing("lamp"), 1.0),
        (thing("lamp"), thing("desk"), 0.0),
        (thing("lamp desk chair table mug", "x", ("c",)), thing("lamp"), 0.5),
        (thing("lamp desk chair table mug"), thing("lamp"), 1.0),
        (thing("lamp desk chair table mug", "x"), thing("lamp"), 1.0),
        (thing("lamp desk chair table", "x", ("c",)), thing("lamp"), 1.0),
        (thing("aa bb cc dd ee ff gg hh ii jj kk"), thing("aa"), 0.1),
        (thing("soft 12"), thing("lamp"), 1.0),
        (thing("soft 12", "x", ("c",)), thing("lamp"), 0.5),
    ],
)
def test_kinds_of_things(wanted, got, worth):
    assert type_score(got, wanted) == worth


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [
        ("machine washable", "washable machine", 100),
        ("blue", "navy blue", 100),
        ("Non-Slip", "non slip", 100),
        ("red", "blue", 200 / 7),
        ("1 pack", "2 pack", 1000 / 12),
        ("", "red", 0),
        ("--", "red", 0),
    ],
)
def test_likeness_of_texts(a, b, ratio):
    assert token_set_ratio(a, b) == pytest.approx(ratio)


@given(st.text("ab c", max_size=8), st.text("ab c", max_size=8))
def test_likeness_is_symmetric_and_bounded(a, b):
    assert token_set_ratio(a, b) == pytest.approx(token_set_ratio(b, a))
    assert 0 <= token_set_ratio(a, b) <= 100


def test_nouns():
    assert nouns_in("Nova Soft Washable 2 Pack Red Shirts for Men") == {"nova", "pack", "shirts", "men"}


def test_no_two_things_of_the_made_up_shop_can_be_confused():
    for pool, options, _ in DEPARTMENTS.values():
        for values in (pool.split(","), *options.values()):
            assert all(token_set_ratio(a, b) <= 85 for a, b in itertools.combinations(values, 2))


def test_the_made_up_shop_is_large_and_varied():
    shop = generated(0, 1200)
    assert len(shop.by_id) == 1200
    assert len({product.category for product in shop.products}) >= 20
    for number in range(200):
        goal = shop.goal(random.Random(number))
        assert len(goal.attributes) == 2
        assert len(goal.options) == 1
        assert goal.target.price < goal.price_upper <= goal.target.price + 40
        assert goal.price_upper % 10 == 0


def test_search_finds_by_words_rare_ones_first():
    index = BM25(["a red shirt", "blue shirts", "red hats and red shoes", "nothing else"])
    assert index.search("shirt", 5) == [0, 1]
    assert index.search("the red hat", 5) == [2, 0]
    assert index.search("zebra", 5) == index.search("", 5) == []
    assert words("Running shirts, berries & glasses") == ["runn", "shirt", "berry", "glass"]


@given(st.lists(st.text("abc ", max_size=12), max_size=8), st.text("abc ", max_size=6))
def test_search_gives_distinct_hits_that_share_a_word(texts, query):
    hits = BM25(texts).search(query, 3)
    assert len(hits) == len(set(hits)) <= 3
    assert all(set(words(query)) & set(words(texts[hit])) for hit in hits)


@pytest.mark.parametrize("style", ["compact", "words"])
def test_pages_lead_to_each_other(style):
    shop = make("webshop", style=style, per_page=3)
    shop.reset(4)
    assert shop.step("click[buy now]").info["effective"] is False
    assert shop.step("search[]").info["effective"] is False
    page = shop.step("<answer>search[soft shirt]</answer>")
    assert page.info["effective"]
    links = shop.clickable()[-3:]
    assert all(link in page.observation for link in links)
    assert style == "words" or links == ["1", "2", "3"]
    assert shop.step("search[again]").info["effective"] is False
    following = shop.step("click[next >]")
    assert following.info["effective"]
    lines = page.observation.splitlines()
    assert not set(lines[-3:]) & set(following.observation.splitlines())
    assert shop.step("click[< prev]").info["state"] == page.info["state"]
    item = shop.step(f"Click[ {links[1].upper()} ]")
    assert item.info["effective"]
    link, *title = lines[-2].split(",")[0].split()
    assert links[1] in link
    assert " ".join(title[:-1]) in item.observation
    for tab in ("description", "features", "reviews"):
        assert shop.step(f"click[{tab}]").info["effective"]
        assert shop.step("click[buy now]").info["effective"] is False
        assert shop.step("click[< prev]").info["state"] == item.info["state"]


def test_options_are_chosen_and_bought():
    shop = make("webshop", style="compact")
    shop.reset(4)
    messages, told = play(shop, 4, "train")
    assert told["success"]
    assert messages[-1]["content"] == "click[buy now]"
    assert sum(len(m["content"]) for m in messages) < 512


def test_options_of_equal_value_do_not_collide(tmp_path):
    item = {**ITEM, "customization_options": {"Size": [{"value": "One"}], "Count": [{"value": "one"}, {"value": "two"}]}}
    shop = make("webshop", files=files(tmp_path, [item], INSTRUCTIONS))
    instance_of(shop)
    shop.step("search[mug]")
    shop.step("click[b01]")
    assert shop.clickable()[2:5] == ["size: one", "count: one", "two"]
    assert shop.step("click[one]").info["effective"] is False
    assert shop.step("click[count: one]").info["state"].endswith("count=one")
    assert shop.step("click[size: one]").info["state"].endswith("count=one, size=one")


ITEM = {
    "asin": "B01",
    "name": "Blue Coffee Mug",
    "full_description": "A mug.",
    "small_description": ["dishwasher safe", "holds a lot"],
    "pricing": "$10.00 $20.00",
    "product_category": "Kitchen › Tableware › Mugs",
    "category": "kitchen",
    "query": "coffee mug",
    "customization_options": {"Color": [{"value": "Blue "}, {"value": "Red"}], "Size": None},
}
INSTRUCTIONS = {
    "B01": {
        "attributes": ["dishwasher safe"],
        "instruction": "i want a mug that is dishwasher safe.",
        "instruction_attributes": ["dishwasher safe"],
    }
}


def files(folder, items, *more):
    paths = []
    for name, content in zip(("items.json", "attributes.json", "people.json"), (items, *more), strict=False):
        (folder / name).write_text(json.dumps(content))
        paths.append(str(folder / name))
    return paths


def instance_of(made):
    """A start in whichever split the only product belongs to."""
    from drumroll.data.split import is_held_out

    return made.reset(0, split="held_out" if is_held_out("b01") else "train")


def test_the_originals_files_are_read(tmp_path):
    shop = make("webshop", files=files(tmp_path, [ITEM, {"asin": "B02"}, ITEM], INSTRUCTIONS))
    assert "i want a mug that is dishwasher safe with " in instance_of(shop)
    product = shop.shop.by_id["b01"]
    assert len(shop.shop.products) == 1
    assert 10 <= product.price <= 20
    assert product.options == {"color": ("blue", "red")}
    assert product.category == ("Kitchen", "Tableware", "Mugs")
    while not (step := shop.step(shop.oracle())).terminated:
        pass
    assert step.reward == 1.0


def test_peoples_instructions_name_their_options(tmp_path):
    wish = {"instruction": "a red mug", "instruction_attributes": ["dishwasher safe"], "instruction_options": ["Red"]}
    shop = make("webshop", files=files(tmp_path, [ITEM], INSTRUCTIONS, {"B01": [wish]}))
    assert "a red mug, and price lower than" in instance_of(shop)
    while not (step := shop.step(shop.oracle())).terminated:
        pass
    assert step.reward == 1.0


@pytest.mark.parametrize(
    ("items", "told", "message"),
    [({}, {}, "must hold a list"), ([], {}, "no product"), ([ITEM], {}, "instruction")],
)
def test_files_that_cannot_be_used_are_named(tmp_path, items, told, message):
    with pytest.raises(DataError, match=message):
        make("webshop", files=files(tmp_path, items, told))


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match="cannot read"):
        make("webshop", files=["/nowhere/items.json", "/nowhere/attributes.json"])
