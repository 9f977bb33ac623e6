"""WebShop: find and buy what an instruction asks for. Written anew from the paper (Yao et al., 2022, arXiv 2207.01206).

Pages: search → results → item (options, description, features, reviews) → buy now. Actions are `search[words]` and
`click[value]`; what a page does not offer has no effect. The reward comes at the purchase (`reward.py`).
"""

from __future__ import annotations

import re
from typing import Any

from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.episode import Episode, action_in, draw, require
from drumroll.envs.webshop import original
from drumroll.envs.webshop.catalogue import MOST_PRODUCTS, Goal, Product, Shop, generated
from drumroll.envs.webshop.reward import matching, score

ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.DOTALL | re.IGNORECASE)
BACK, PREV, NEXT, BUY = "back to search", "< prev", "next >", "buy now"
TABS = ("description", "features", "reviews")
HITS = 50

RULES = """You shop on a web site to fulfil an instruction. In every turn you see a page and answer with one action: search[words] on the search page, or click[value] with a value that the page shows in brackets, like <answer>search[red shirt]</answer> or <answer>click[buy now]</answer>. Choose the options that are asked for before you buy; buying ends it."""


@ENVIRONMENTS.register("webshop", runs="thread")
class WebShop(Episode):
    """A generated shop (`products`, `catalogue` is its seed; goals with so many `attributes` and `options`), or the original's
    `files: [products, attributes, instructions]`. `per_page` hits are shown; `repeat_goal` puts the goal on every page."""

    name = "webshop"

    def __init__(
        self,
        products: int = 1200,
        catalogue: int = 0,
        attributes: int = 2,
        options: int = 1,
        files: list[str] | None = None,
        per_page: int | None = None,
        repeat_goal: bool = False,
        style: str = "words",
        max_turns: int = 15,
        split: str = "train",
    ) -> None:
        super().__init__(style, split, max_turns)
        require(self.name, 36 <= products <= MOST_PRODUCTS, f"products must be between 36 and {MOST_PRODUCTS}, got {products}")
        require(self.name, 1 <= attributes <= 4, f"attributes must be between 1 and 4, got {attributes}")
        require(self.name, 0 <= options <= 2, f"options must be 0, 1 or 2, got {options}")
        require(self.name, files is None or len(files) in (2, 3), "files are products, attributes and, if any, instructions")
        self.shop: Shop = original.load(*files) if files else generated(catalogue, products)
        self.attributes, self.options, self.repeat_goal = attributes, options, repeat_goal
        self.per_page = per_page or (3 if style == "compact" else 10)
        self._goal: Goal
        self._query = ""
        self._hits: list[Product] = []
        self._page = 0
        self._item: Product | None = None
        self._tab = ""
        self._chosen: dict[str, str] = {}

    def reset(self, seed: int, instance: int | None = None, split: str | None = None, **row: Any) -> str:
        """Begin at the search page, with the goal of the row or of the seed. A target product is of one split only."""
        self.begin(seed)
        number = seed if instance is None else instance
        self._goal = draw(
            self.name,
            number,
            split or self.split,
            lambda rng: self.shop.goal(rng, self.attributes, self.options),
            lambda goal: goal.target.id,
        )
        self._to_search()
        if self.style == "compact":
            return f"shop\n{self._goal.short()}\n{self._shown()}\n"
        return f"{RULES}\n\nInstruction: {self._goal.words()}\n\n{self._shown()}"

    def step(self, text: str) -> Step:
        """One action on the page."""
        found = ACTION.fullmatch(action_in(text))
        if not found:
            return self._refused("That is no action: answer with search[words] or click[value].", malformed=True)
        verb, value = found[1].lower(), " ".join(found[2].lower().split())
        if verb == "click" and value == BUY and self._item and not self._tab:
            return self._buy(self._item)
        before = self._state()
        refused = self._search(value) if verb == "search" else self._click(value)
        if refused:
            return self._refused(refused)
        return self.answered(self._turned(), effective=self._state() != before, state=self._state())

    def _buy(self, item: Product) -> Step:
        reward = score(item, self._chosen, self._goal)
        end = f"\n{reward:.2f}\n" if self.style == "compact" else f"You bought {item.id}. Score: {reward:.2f} of 1."
        return self.answered(
            end, effective=True, state=f"bought {self._state()}", reward=reward, over=True, success=reward >= 1
        )

    def _search(self, value: str) -> str:
        """Go to the hits; a sentence if that is not possible here."""
        if self._query:
            return f"There is no search field here: click[{BACK}] first."
        if not value:
            return "Name some words to search for, like search[red shirt]."
        self._query, self._page = value, 0
        self._hits = self.shop.search(value, HITS)
        return ""

    def _click(self, value: str) -> str:
        """Follow a link; a sentence if the page has none of that name."""
        if value not in self.clickable():
            return f"There is no [{value[:40]}] on this page."
        if value == BACK:
            self._to_search()
        elif value == NEXT:
            self._page += 1
        elif value == PREV:
            self._to_previous()
        elif self._item is None:
            self._item, self._chosen = self._links()[value], {}
        elif value in TABS:
            self._tab = value
        else:
            name, chosen = self._choices(self._item)[value]
            self._chosen[name] = chosen
        return ""

    def clickable(self) -> list[str]:
        """What the page lets one click, in its order."""
        if not self._query:
            return []
        if self._tab:
            return [BACK, PREV]
        if self._item:
            return [BACK, PREV, *self._choices(self._item), *TABS, BUY]
        return [BACK, PREV, *([NEXT] if self._page + 1 < self._pages() else []), *self._links()]

    def _links(self) -> dict[str, Product]:
        """Hits of the page by what is clicked: the product's id, in the compact style its place."""
        return {str(place) if self.style == "compact" else hit.id: hit for place, hit in enumerate(self._on_page(), 1)}

    def _choices(self, item: Product) -> dict[str, tuple[str, str]]:
        """Option by what is clicked: its value, or `name: value` where the value alone would be ambiguous."""
        pairs = [(name, value) for name, values in item.options.items() for value in values]
        reserved = {BACK, PREV, NEXT, BUY, *TABS}
        several = {v for n, v in pairs if v in reserved or sum(v == other for _, other in pairs) > 1}
        return {(f"{name}: {value}" if value in several else value): (name, value) for name, value in pairs}

    def _to_search(self) -> None:
        self._query, self._hits, self._page, self._item, self._tab, self._chosen = "", [], 0, None, "", {}

    def _to_previous(self) -> None:
        if self._tab:
            self._tab = ""
        elif self._item:
            self._item, self._chosen = None, {}
        elif self._page:
            self._page -= 1
        else:
            self._to_search()

    def _pages(self) -> int:
        return max(1, -(-len(self._hits) // self.per_page))

    def _on_page(self) -> list[Product]:
        return self._hits[self._page * self.per_page : (self._page + 1) * self.per_page]

    def _state(self) -> str:
        chosen = ", ".join(f"{name}={value}" for name, value in sorted(self._chosen.items()))
        return f"{self._query}|{self._page}|{self._item.id if self._item else ''}|{self._tab}|{chosen}"

    def _refused(self, why: str, *, malformed: bool = False) -> Step:
        said = "?search[] click[]\n" if self.style == "compact" else f"{why}\n\n"
        return self.answered(self._turned(said), effective=False, state=self._state(), malformed=malformed)

    def _turned(self, said: str = "") -> str:
        """A page after the first one."""
        if self.style == "compact":
            return f"\n{said}{self._goal.short() + chr(10) if self.repeat_goal else ''}{self._shown()}\n"
        goal = f"Instruction: {self._goal.words()}\n\n" if self.repeat_goal else ""
        return f"{said}{goal}{self._shown()}"

    def _shown(self) -> str:
        """The page."""
        return self._shown_short() if self.style == "compact" else self._shown_long()

    def _shown_short(self) -> str:
        if not self._query:
            return "search"
        if self._item is None:
            lines = [f"{link} {hit.title} {hit.price:g}" for link, hit in self._links().items()]
            return "\n".join([f"{self._page + 1}/{self._pages()}", *(lines or ["none"])])
        if self._tab:
            return self._tab_text(self._item)
        lines = [f"{self._item.title} {self._item.price:g}"]
        for name in self._item.options:
            shown = [
                f"*{v}" if self._chosen.get(n) == v else key for key, (n, v) in self._choices(self._item).items() if n == name
            ]
            lines.append(f"{name}: {', '.join(shown)}")
        return "\n".join(lines)

    def _shown_long(self) -> str:
        if not self._query:
            return "Search page. Use search[words]."
        links = f"[{BACK}] [{PREV}]"
        if self._item is None:
            lines = [f"[{link}] {hit.title}, ${hit.price:.2f}" for link, hit in self._links().items()] or ["Nothing was found."]
            more = f" [{NEXT}]" if NEXT in self.clickable() else ""
            return "\n".join([f"Page {self._page + 1} of {self._pages()} for '{self._query}'. {links}{more}", *lines])
        if self._tab:
            return f"{links}\n{self._tab.capitalize()}: {self._tab_text(self._item)}"
        lines = [links, f"{self._item.title}", f"Price: ${self._item.price:.2f}"]
        for name in self._item.options:
            values = " ".join(f"[{key}]" for key, (n, _) in self._choices(self._item).items() if n == name)
            lines.append(f"{name}: {values}" + (f" (chosen: {self._chosen[name]})" if name in self._chosen else ""))
        return "\n".join([*lines, " ".join(f"[{tab}]" for tab in TABS) + f" [{BUY}]"])

    def _tab_text(self, item: Product) -> str:
        texts = {"description": item.description, "features": "\n".join(item.bullets), "reviews": ""}
        return texts[self._tab] or "none"

    def oracle(self) -> str:
        """Search for the goal's words, go to the first hit that fulfils it, choose, buy. By title if they do not find it."""
        if not self._query:
            found = any(self._fulfils(hit) for hit in self.shop.search(self._goal.keywords(), HITS))
            return self.say(f"search[{self._goal.keywords() if found else self._goal.target.title}]")
        return self.say(f"click[{self._right_click()}]")

    def _right_click(self) -> str:
        if self._tab:
            return PREV
        if self._item is None:
            place = next((i for i, hit in enumerate(self._hits) if self._fulfils(hit)), None)
            if place is None:
                return BACK
            page = place // self.per_page
            return list(self._links())[place % self.per_page] if page == self._page else NEXT if page > self._page else PREV
        if not self._fulfils(self._item):
            return PREV
        labels = {pair: label for label, pair in self._choices(self._item).items()}
        wanted = [pair for option in self._goal.options if (pair := matching(option, self._item))]
        missing = [labels[name, value] for name, value in wanted if self._chosen.get(name) != value]
        return missing[0] if missing else BUY

    def _fulfils(self, item: Product) -> bool:
        """Whether the item is of the kind asked for and, with the right options, worth 1; or the target itself."""
        chosen = dict(pair for option in self._goal.options if (pair := matching(option, item)))
        same_kind = item.query == self._goal.target.query
        return item is self._goal.target or (same_kind and score(item, chosen, self._goal) >= 1)

    def random_action(self) -> str:
        """Any click that the page offers, or a search for some of the goal's words."""
        if not self._query:
            known = self._goal.keywords().split()
            return self.say(f"search[{' '.join(self.rng.sample(known, self.rng.randint(1, min(2, len(known)))))}]")
        return self.say(f"click[{self.rng.choice(self.clickable())}]")

    def flawed(self) -> str:
        """Search rightly, then buy the first hit as it is."""
        if not self._query:
            return self.say(f"search[{self._goal.keywords()}]")
        if self._item is None:
            return self.say(f"click[{next(iter(self._links())) if self._hits and not self._page else BACK}]")
        return self.say(f"click[{PREV if self._tab else BUY}]")
