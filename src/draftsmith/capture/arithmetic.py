"""`builtin:arithmetic`: grade-school word problems, made by a seeded generator, the same ones for ever.

Sentences are plain, numbers are small and every answer is a whole, non-negative number, so that a model of 135M
parameters can reason about them in two or three steps. The generator does its own arithmetic on SHA-256 and uses no
random module, whose sequence might change. Any change of what `rows` yields must raise VERSION.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

VERSION = 1
COUNT = 2000

# fmt: off
NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Kate", "Liam", "Maria", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Omar", "Lily", "Hugo", "Nina", "Peter", "Sara", "Tom",
    "Zoe", "Adam", "Clara", "Leo",
)
THINGS = (
    "apples", "marbles", "books", "stickers", "coins", "cards", "pencils", "shells", "oranges", "buttons", "stamps",
    "candles", "cookies", "beads", "balloons", "erasers", "plums", "crayons", "nuts", "flowers",
)
# fmt: on
BOXES = ("bags", "boxes", "baskets", "jars", "packs", "trays")
GOODS = ("notebook", "toy car", "cap", "mug", "ball", "poster", "scarf", "puzzle", "lamp", "kite", "brush", "bowl")
DISHES = ("sandwich", "salad", "pizza", "soup", "pie", "bagel")
PLACES = ("the lake", "the school", "the market", "the library", "the beach", "the farm", "the station")
GROUPS = ("children", "friends", "teammates", "cousins", "students", "neighbors")
VEHICLES = ("train", "bus", "car", "boat")
JOBS = ("washes cars", "walks dogs", "mows lawns", "paints fences", "cleans windows")
PLANTS = ("tomato", "bean", "pumpkin", "sunflower", "pepper", "cabbage")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


class Draw:
    """Seeded choices: the n-th draw of a row is a hash of (VERSION, row, n)."""

    def __init__(self, row: int) -> None:
        self.row, self.count = row, 0

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        digest = hashlib.sha256(f"arithmetic/{VERSION}/{self.row}/{self.count}".encode()).digest()
        self.count += 1
        return low + int.from_bytes(digest[:8], "big") % (high - low + 1)

    def one(self, choices: tuple[str, ...]) -> str:
        """One of `choices`."""
        return choices[self.between(0, len(choices) - 1)]

    def two(self, choices: tuple[str, ...]) -> tuple[str, str]:
        """Two different ones of `choices`."""
        first = self.between(0, len(choices) - 1)
        step = self.between(1, len(choices) - 1)
        return choices[first], choices[(first + step) % len(choices)]


def rows() -> Iterator[dict[str, Any]]:
    """COUNT distinct rows: `prompt`, `answer` (the number, as text) and `source`."""
    seen: set[str] = set()
    number = 0
    while len(seen) < COUNT:
        draw = Draw(number)
        prompt, answer = PROBLEMS[number % len(PROBLEMS)](draw)
        number += 1
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "answer": str(answer), "source": "arithmetic"}


def _found_more(d: Draw) -> tuple[str, int]:
    name, thing, box = d.one(NAMES), d.one(THINGS), d.one(BOXES)
    bags, each, more = d.between(2, 9), d.between(2, 12), d.between(2, 20)
    return (
        f"{name} has {bags} {box} with {each} {thing} in each. Then {name} finds {more} more {thing}. "
        f"How many {thing} does {name} have now?",
        bags * each + more,
    )


def _gave_away(d: Draw) -> tuple[str, int]:
    name, thing, box = d.one(NAMES), d.one(THINGS), d.one(BOXES)
    bags, each = d.between(2, 9), d.between(3, 12)
    given = d.between(2, bags * each - 1)
    return (
        f"{name} packs {bags} {box} with {each} {thing} in each and gives away {given} {thing}. "
        f"How many {thing} are left?",
        bags * each - given,
    )


def _voucher(d: Draw) -> tuple[str, int]:
    name, good = d.one(NAMES), d.one(GOODS)
    count, price, left = d.between(2, 6), d.between(2, 15), d.between(2, 20)
    return (
        f"{name} buys {count} {_many(good)} for {price} dollars each and pays with {count * price + left} dollars. "
        "How much change is there?",
        left,
    )


def _taken_and_put(d: Draw) -> tuple[str, int]:
    name, thing = d.one(NAMES), d.one(THINGS)
    taken, back, rest = d.between(5, 20), d.between(2, 4), d.between(3, 40)
    return (
        f"There are {taken + rest} {thing} in a box. {name} takes out {taken} of them and later puts {back} back. "
        f"How many {thing} are in the box now?",
        rest + back,
    )


def _shared(d: Draw) -> tuple[str, int]:
    name, thing, group = d.one(NAMES), d.one(THINGS), d.one(GROUPS)
    people, each = d.between(2, 9), d.between(2, 12)
    return (
        f"{name} shares {people * each} {thing} equally among {people} {group}. How many {thing} does each one get?",
        each,
    )


def _shared_after_eating(d: Draw) -> tuple[str, int]:
    name, group = d.one(NAMES), d.one(GROUPS)
    people, each, kept = d.between(2, 8), d.between(2, 9), d.between(2, 9)
    return (
        f"{name} bakes {people * each + kept} cookies, keeps {kept} and shares the rest equally among {people} "
        f"{group}. How many cookies does each one get?",
        each,
    )


def _two_prices(d: Draw) -> tuple[str, int]:
    name, (first, second) = d.one(NAMES), d.two(GOODS)
    price, less = d.between(8, 30), d.between(2, 7)
    return (
        f"{name} buys a {first} for {price} dollars. A {second} costs {less} dollars less than the {first}. "
        "How many dollars do both cost together?",
        2 * price - less,
    )


def _basket_total(d: Draw) -> tuple[str, int]:
    name, (first, second) = d.one(NAMES), d.two(GOODS)
    a, b, p, q = d.between(2, 5), d.between(2, 5), d.between(2, 9), d.between(2, 9)
    return (
        f"A {first} costs {p} dollars and a {second} costs {q} dollars. {name} buys {a} {_many(first)} and {b} "
        f"{_many(second)}. How many dollars does {name} pay?",
        a * p + b * q,
    )


def _saving(d: Draw) -> tuple[str, int]:
    name, good = d.one(NAMES), d.one(GOODS)
    weekly, weeks, start = d.between(2, 12), d.between(2, 10), d.between(2, 25)
    return (
        f"{name} has {start} dollars and saves {weekly} dollars every week for a {good}. "
        f"How many dollars does {name} have after {weeks} weeks?",
        start + weekly * weeks,
    )


def _weeks_to_save(d: Draw) -> tuple[str, int]:
    name, good = d.one(NAMES), d.one(GOODS)
    weekly, weeks = d.between(2, 10), d.between(2, 10)
    return (
        f"A {good} costs {weekly * weeks} dollars. {name} saves {weekly} dollars every week. "
        f"After how many weeks can {name} buy the {good}?",
        weeks,
    )


def _job(d: Draw) -> tuple[str, int]:
    name, job = d.one(NAMES), d.one(JOBS)
    pay, hours = d.between(5, 15), d.between(2, 8)
    spent = d.between(2, pay * hours - 1)
    return (
        f"{name} {job} for {hours} hours and earns {pay} dollars per hour. Then {name} spends {spent} dollars. "
        "How many dollars are left?",
        pay * hours - spent,
    )


def _lunch(d: Draw) -> tuple[str, int]:
    name, dish, group = d.one(NAMES), d.one(DISHES), d.one(GROUPS)
    people, price, tip = d.between(2, 7), d.between(4, 12), d.between(2, 9)
    return (
        f"{name} invites {people} {group} to lunch. Lunch for each guest costs {price} dollars, and the {dish} for "
        f"{name} costs {tip} dollars. How many dollars is the whole bill?",
        people * price + tip,
    )


def _reading(d: Draw) -> tuple[str, int]:
    name, pages, days, left = d.one(NAMES), d.between(5, 20), d.between(2, 9), d.between(5, 60)
    return (
        f"{name} reads {pages} pages a day of a book that has {pages * days + left} pages. "
        f"How many pages are left after {days} days?",
        left,
    )


def _trip_distance(d: Draw) -> tuple[str, int]:
    vehicle, place = d.one(VEHICLES), d.one(PLACES)
    speed, hours, more = 10 * d.between(2, 9), d.between(2, 6), d.between(3, 30)
    return (
        f"A {vehicle} goes {speed} miles per hour for {hours} hours and then {more} more miles to {place}. "
        "How many miles is the whole trip?",
        speed * hours + more,
    )


def _round_trip(d: Draw) -> tuple[str, int]:
    name, place, miles, days = d.one(NAMES), d.one(PLACES), d.between(2, 15), d.between(2, 6)
    return (
        f"{name} lives {miles} miles from {place} and rides there and back every day for {days} days. "
        f"How many miles does {name} ride in all?",
        2 * miles * days,
    )


def _distance_left(d: Draw) -> tuple[str, int]:
    name, place = d.one(NAMES), d.one(PLACES)
    first, second, left = d.between(3, 20), d.between(3, 20), d.between(2, 30)
    return (
        f"{name} walks to {place}, which is {first + second + left} miles away. On the first day {name} walks {first} "
        f"miles and on the second day {second} miles. How many miles are left?",
        left,
    )


def _hours_of_driving(d: Draw) -> tuple[str, int]:
    name, place, vehicle = d.one(NAMES), d.one(PLACES), d.one(VEHICLES)
    speed, hours = 10 * d.between(2, 8), d.between(2, 7)
    return (
        f"{name} travels {speed * hours} miles to {place}. The {vehicle} goes {speed} miles per hour. "
        "How many hours does the trip take?",
        hours,
    )


def _minutes_of_tasks(d: Draw) -> tuple[str, int]:
    name, tasks, minutes, pause = d.one(NAMES), d.between(2, 8), d.between(4, 15), d.between(2, 20)
    return (
        f"{name} solves {tasks} tasks. Each task takes {minutes} minutes, and {name} rests for {pause} minutes after "
        "the last one. How many minutes does all of it take?",
        tasks * minutes + pause,
    )


def _practice_week(d: Draw) -> tuple[str, int]:
    name, day, other = d.one(NAMES), *d.two(DAYS)
    first, more = d.between(10, 45), d.between(5, 30)
    return (
        f"{name} practices the piano for {first} minutes on {day}. On {other} {name} practices {more} minutes longer. "
        "How many minutes are that in both days together?",
        2 * first + more,
    )


def _movie_end(d: Draw) -> tuple[str, int]:
    name, film, breaks, watched = d.one(NAMES), 10 * d.between(6, 12), d.between(5, 25), 10 * d.between(2, 5)
    return (
        f"A film takes {film} minutes and has a break of {breaks} minutes. {name} has been at the cinema for {watched} "
        "minutes since the film began. How many minutes are left until the end?",
        film + breaks - watched,
    )


def _twice_as_many(d: Draw) -> tuple[str, int]:
    (name, other), thing = d.two(NAMES), d.one(THINGS)
    count, times = d.between(3, 20), d.between(2, 4)
    word = {2: "twice", 3: "three times", 4: "four times"}[times]
    return (
        f"{name} has {count} {thing}. {other} has {word} as many. How many {thing} do they have together?",
        count + times * count,
    )


def _difference(d: Draw) -> tuple[str, int]:
    (name, other), thing, day = d.two(NAMES), d.one(THINGS), d.one(DAYS)
    fewer, lost, more = d.between(3, 30), d.between(2, 9), d.between(2, 25)
    return (
        f"On {day} {name} collects {fewer + lost + more} {thing} and {other} collects {fewer}. {name} loses {lost} of "
        f"them. How many more {thing} than {other} does {name} have then?",
        more,
    )


def _rows_of_plants(d: Draw) -> tuple[str, int]:
    name, plant = d.one(NAMES), d.one(PLANTS)
    lines, each = d.between(3, 9), d.between(3, 12)
    dead = d.between(2, min(15, lines * each - 1))
    return (
        f"{name} plants {lines} rows of {each} {plant} plants. {dead} of the plants do not grow. "
        f"How many {plant} plants grow?",
        lines * each - dead,
    )


def _seats(d: Draw) -> tuple[str, int]:
    group, vehicle = d.one(GROUPS), d.one(("bus", "boat", "train"))
    lines, each = d.between(4, 12), d.between(2, 6)
    empty = d.between(2, lines * each - 2)
    return (
        f"A {vehicle} has {lines} rows with {each} seats each. {lines * each - empty} of the seats are taken by "
        f"{group}. How many seats are free?",
        empty,
    )


def _boxes_needed(d: Draw) -> tuple[str, int]:
    name, thing, box = d.one(NAMES), d.one(THINGS), d.one(BOXES)
    each, count, kept = d.between(3, 12), d.between(2, 9), d.between(2, 9)
    return (
        f"{name} has {each * count + kept} {thing}, keeps {kept} and puts the others into {box} of {each}. "
        f"How many {box} does {name} fill?",
        count,
    )


def _half_left(d: Draw) -> tuple[str, int]:
    name, thing, half, bought = d.one(NAMES), d.one(THINGS), d.between(3, 25), d.between(2, 15)
    return (
        f"{name} has {2 * half} {thing} and gives half of them to {d.one(GROUPS)}. Then {name} gets {bought} new "
        f"{thing}. How many {thing} does {name} have at the end?",
        half + bought,
    )


def _discount(d: Draw) -> tuple[str, int]:
    name, good = d.one(NAMES), d.one(GOODS)
    price, off, count = d.between(6, 25), d.between(2, 5), d.between(2, 5)
    return (
        f"A {good} costs {price} dollars. Today each {good} is {off} dollars cheaper. "
        f"How many dollars does {name} pay for {count} {_many(good)}?",
        (price - off) * count,
    )


def _sold(d: Draw) -> tuple[str, int]:
    name, thing, (day, other) = d.one(NAMES), d.one(THINGS), d.two(DAYS)
    first, more, price = d.between(4, 20), d.between(2, 9), d.between(2, 5)
    return (
        f"{name} sells {first} {thing} on {day} and {more} more than that on {other}. Each one costs {price} dollars. "
        f"How many dollars does {name} earn on {other}?",
        (first + more) * price,
    )


def _ages(d: Draw) -> tuple[str, int]:
    (name, other), age, older, years = d.two(NAMES), d.between(5, 14), d.between(2, 9), d.between(2, 10)
    return (
        f"{name} is {age} years old. {other} is {older} years older. How old will {other} be in {years} years?",
        age + older + years,
    )


def _animals(d: Draw) -> tuple[str, int]:
    name, (many, few) = d.one(NAMES), d.two(("cows", "goats", "sheep", "horses", "pigs"))
    a, b = d.between(2, 12), d.between(2, 12)
    return (f"{name} has {a} {many} and {b} {few}. Each animal has 4 legs. How many legs are there?", 4 * (a + b))


def _equal_pay(d: Draw) -> tuple[str, int]:
    (name, other), good = d.two(NAMES), d.one(GOODS)
    half, extra = d.between(4, 20), d.between(2, 9)
    return (
        f"{name} and {other} buy a {good} for {2 * half} dollars and pay half each. {name} also buys a drink for "
        f"{extra} dollars. How many dollars does {name} spend?",
        half + extra,
    )


def _water(d: Draw) -> tuple[str, int]:
    name, plant = d.one(NAMES), d.one(PLANTS)
    plants, each, tank = d.between(3, 9), d.between(2, 6), d.between(5, 40)
    return (
        f"{name} has a tank with {plants * each + tank} liters of water and gives {each} liters to each of {plants} "
        f"{plant} plants. How many liters are left in the tank?",
        tank,
    )


def _many(good: str) -> str:
    """The plural."""
    return good + ("es" if good.endswith("sh") else "s")


# fmt: off
PROBLEMS: tuple[Callable[[Draw], tuple[str, int]], ...] = (
    _found_more, _gave_away, _voucher, _taken_and_put, _shared, _shared_after_eating, _two_prices, _basket_total,
    _saving, _weeks_to_save, _job, _lunch, _reading, _trip_distance, _round_trip, _distance_left, _hours_of_driving,
    _minutes_of_tasks, _practice_week, _movie_end, _twice_as_many, _difference, _rows_of_plants, _seats,
    _boxes_needed, _half_left, _discount, _sold, _ages, _animals, _equal_pay, _water,
)
# fmt: on
