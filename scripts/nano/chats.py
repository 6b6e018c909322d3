"""Generated conversations, one function a kind.

A turn generator takes a random.Random and returns Turn(kind, question, answer, expect,
match, think): `expect` is what a right answer must hold (match "contains") or be ("exact"),
`think` is the working shown when thinking is on. Questions whose hash falls in
the held-out share never enter the training set; the suite is drawn from them alone.
"""

import hashlib
import json
import random
from dataclasses import dataclass, field

from . import words as W

HELD_OUT_ONE_IN = 24


@dataclass
class Turn:
    kind: str
    question: str
    answer: str
    expect: str
    match: str = "contains"
    think: str | None = None
    tools: list = field(default_factory=list)
    before: list = field(default_factory=list)  # messages that must come first
    call: dict | None = None  # the answer is this tool call


def held_out(turn: Turn) -> bool:
    key = json.dumps([m["content"] for m in turn.before if m["role"] == "user"] + [turn.question])
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


# ---- arithmetic -------------------------------------------------------------------------

def add_steps(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    text = f"{a % 10} + {b % 10} = {ones}"
    if a < 10 and b < 10:
        return text + "."
    carry = ones // 10
    tens = f"{a // 10} + {b // 10}" + (" + 1" if carry else "")
    return f"{text}, {tens} = {a // 10 + b // 10 + carry}."


def sub_steps(a: int, b: int) -> str:
    borrow = a % 10 < b % 10
    top = a % 10 + (10 if borrow else 0)
    text = f"{top} - {b % 10} = {top - b % 10}"
    if a < 10:
        return text + "."
    tens = f"{a // 10} - {b // 10}" + (" - 1" if borrow else "")
    return f"{text}, {tens} = {a // 10 - b // 10 - borrow}."


ADD = ["What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b} = ?", "Add {a} and {b}.",
       "Calculate {a} + {b}.", "How much is {a} + {b}?", "{a} + {b}"]
SUB = ["What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b} = ?", "Subtract {b} from {a}.",
       "Calculate {a} - {b}.", "How much is {a} - {b}?", "{a} - {b}"]
MUL = ["What is {a} times {b}?", "{a} * {b} = ?", "Multiply {a} by {b}.", "Calculate {a} * {b}.",
       "What is {a} * {b}?", "How much is {a} times {b}?", "{a} x {b} = ?"]


def worked(r, kind, question, steps, result):
    """Shows short working in the answer; with thinking on, the working moves there."""
    return Turn(kind, question, f"{steps} {result}" if steps else result, result, think=steps)


def addition(r):
    a, b = r.randrange(100), r.randrange(100)
    if r.random() < 0.5:
        a, b = r.randrange(10), r.randrange(10)
    return worked(r, "addition", r.choice(ADD).format(a=a, b=b), add_steps(a, b), f"{a} + {b} = {a + b}")


def subtraction(r):
    a, b = r.randrange(100), r.randrange(100)
    if r.random() < 0.5:
        a, b = r.randrange(10), r.randrange(10)
    a, b = max(a, b), min(a, b)
    return worked(r, "subtraction", r.choice(SUB).format(a=a, b=b), sub_steps(a, b), f"{a} - {b} = {a - b}")


def multiplication(r):
    a, b = r.randrange(1, 11), r.randrange(1, 11)
    result = f"{a} * {b} = {a * b}"
    return Turn("multiplication", r.choice(MUL).format(a=a, b=b), result, result)


# ---- letters, words and lists -----------------------------------------------------------

SPELL = ["Spell the word {w}.", "How do you spell {w}?", "Spell {w}.", "Please spell {w}.",
         "Can you spell {w}?", "Spell the word {w} letter by letter."]
LETTERS = ["How many letters are in {w}?", "How many letters does {w} have?",
           "Count the letters in {w}.", "How many letters are in the word {w}?",
           "How long is the word {w}?"]
FIRST = ["What is the first letter of {w}?", "Which letter does {w} begin with?",
         "What letter does {w} start with?", "Tell me the first letter of {w}."]
LAST = ["What is the last letter of {w}?", "Which letter does {w} end with?",
        "What letter comes last in {w}?", "Tell me the last letter of {w}."]


def spelling(r):
    w = r.choice(W.WORDS)
    text = "-".join(w)
    return Turn("spelling", r.choice(SPELL).format(w=w), text, text)


def letters(r):
    w = r.choice(W.WORDS)
    steps = ", ".join(f"{c} {i + 1}" for i, c in enumerate(w)) + "."
    return worked(r, "letters", r.choice(LETTERS).format(w=w), steps, f"{len(w)} letters.")


def first_last(r):
    w = r.choice(W.WORDS)
    if r.random() < 0.5:
        answer, q = f"The word {w} begins with {w[0]}.", r.choice(FIRST)
    else:
        answer, q = f"The word {w} ends with {w[-1]}.", r.choice(LAST)
    return Turn("first and last", q.format(w=w), answer, answer)


def count_words(r):
    ws = r.sample(W.WORDS, r.randrange(2, 7))
    q = r.choice(["How many words are in this list: {s}?", "Count the words: {s}",
                  "How many words are here: {s}?"]).format(s=" ".join(ws))
    steps = ", ".join(f"{w} {i + 1}" for i, w in enumerate(ws)) + "."
    return worked(r, "counting words", q, steps, f"{len(ws)} words.")


def sorting(r):
    down = r.random() < 0.3
    if r.random() < 0.8:
        xs = r.sample(range(10), r.choice([3, 3, 4]))
    else:
        xs = r.sample(range(10, 100), 3)
    s = ", ".join(map(str, xs))
    if down:
        q = r.choice(["Sort these numbers from large to small: {s}", "Sort from high to low: {s}"])
    else:
        q = r.choice(["Sort these numbers: {s}", "Sort from small to large: {s}",
                      "Put these numbers in order: {s}", "Please sort {s}.", "Sort: {s}"])
    text = ", ".join(map(str, sorted(xs, reverse=down)))
    return Turn("sorting", q.format(s=s), text, text)


def count_up(r):
    a = r.randrange(0, 20)
    b = a + r.randrange(2, 8)
    if r.random() < 0.3:
        q = r.choice(["Count down from {b} to {a}.", "Count from {b} down to {a}."])
        xs = range(b, a - 1, -1)
    else:
        q = r.choice(["Count from {a} to {b}.", "Count up from {a} to {b}.",
                      "Please count from {a} to {b}.", "List the numbers from {a} to {b}."])
        xs = range(a, b + 1)
    text = ", ".join(map(str, xs))
    return Turn("counting", q.format(a=a, b=b), text, text)


def compare(r):
    a, b = r.sample(range(100), 2)
    if r.random() < 0.5:
        q = r.choice(["Which is bigger, {a} or {b}?", "Which number is larger: {a} or {b}?",
                      "What is larger, {a} or {b}?"])
        answer = f"{max(a, b)} is larger than {min(a, b)}."
    else:
        q = r.choice(["Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?",
                      "What is smaller, {a} or {b}?"])
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    return Turn("comparing", q.format(a=a, b=b), answer, answer)


def parity(r):
    a = r.randrange(100)
    q = r.choice(["Is {a} even or odd?", "Is the number {a} odd or even?", "Is {a} an even number?",
                  "Even or odd: {a}?"])
    answer = f"{a} is {'odd' if a % 2 else 'even'}."
    return Turn("even or odd", q.format(a=a), answer, answer)


def repeat(r):
    s = " ".join(r.choice(W.WORDS) for _ in range(r.randrange(2, 6)))
    q = r.choice(["Repeat after me: {s}", "Say this: {s}", "Repeat: {s}", "Please say: {s}",
                  "Repeat these words: {s}"])
    return Turn("repeating", q.format(s=s), s, s, match="exact")


# ---- tables -----------------------------------------------------------------------------

def capital(r):
    c = r.choice(list(W.CAPITALS))
    q = r.choice(["What is the capital of {c}?", "Which city is the capital of {c}?",
                  "Name the capital of {c}.", "Tell me the capital of {c}.",
                  "Do you know the capital of {c}?", "What's the capital of {c}?",
                  "The capital of {c} is what?"])
    return Turn("capitals", q.format(c=c), f"The capital of {c} is {W.CAPITALS[c]}.", W.CAPITALS[c])


def opposite(r):
    a, b = r.choice(W.OPPOSITES)
    q = r.choice(["What is the opposite of {a}?", "Tell me the opposite of {a}.",
                  "What is the opposite of the word {a}?", "Name the opposite of {a}.",
                  "Which word is the opposite of {a}?", "What's the opposite of {a}?"])
    answer = f"The opposite of {a} is {b}."
    return Turn("opposites", q.format(a=a), answer, answer)


def plural(r):
    a = r.choice(list(W.PLURALS))
    q = r.choice(["What is the plural of {a}?", "Tell me the plural of {a}.", "Make {a} plural.",
                  "What is the plural form of {a}?", "One {a}, two ...?", "Name the plural of {a}."])
    answer = f"The plural of {a} is {W.PLURALS[a]}."
    return Turn("plurals", q.format(a=a), answer, answer)


def definition(r):
    w = r.choice(list(W.DEFINITIONS))
    an = "an" if w[0] in "aeiou" else "a"
    q = r.choice(["What does {w} mean?", "Define {w}.", "Define the word {w}.",
                  "What is the meaning of {w}?", "What is meant by {w}?", "Explain the word {w}.",
                  "Give a definition of {w}.", "What is {an} {w}?"])
    text = f"{w}: {W.DEFINITIONS[w]}."
    return Turn("definitions", q.format(w=w, an=an), text, W.DEFINITIONS[w])


def animal(r):
    a = r.choice(list(W.ANIMAL_SOUNDS))
    q = r.choice(["What sound does a {a} make?", "What does a {a} say?", "Which sound does a {a} make?",
                  "How does a {a} sound?", "Tell me the sound of a {a}."])
    answer = f"The sound of a {a} is: {W.ANIMAL_SOUNDS[a]}."
    return Turn("sounds and colors", q.format(a=a), answer, W.ANIMAL_SOUNDS[a])


def color(r):
    a = r.choice(list(W.COLORS))
    q = r.choice(["What color is {a}?", "Which color is {a}?", "Tell me the color of {a}.",
                  "What is the color of {a}?", "What color does {a} have?"])
    answer = f"The color of {a} is {W.COLORS[a]}."
    return Turn("sounds and colors", q.format(a=a), answer, answer)


def calendar(r):
    names, unit = r.choice([(W.DAYS, "day"), (W.MONTHS, "month")])
    i = r.randrange(len(names))
    step, rel = r.choice([(1, "after"), (-1, "before")])
    q = r.choice(["Which {u} comes {r} {x}?", "What {u} is {r} {x}?", "What comes {r} {x}?",
                  "Name the {u} {r} {x}.", "Tell me the {u} {r} {x}.", "What is the {u} {r} {x}?"])
    answer = f"The {unit} {rel} {names[i]} is {names[(i + step) % len(names)]}."
    return Turn("days and months", q.format(u=unit, r=rel, x=names[i]), answer, answer)


# ---- talk -------------------------------------------------------------------------------

def beyond(r):
    t = r.choice(W.BEYOND)
    q = r.choice(["What do you think about {t}?", "Explain {t} to me.", "Tell me about {t}.",
                  "Write an essay about {t}.", "Can you explain {t}?", "What do you know about {t}?",
                  "I need help with {t}.", "Why is {t} important?", "Give me advice about {t}.",
                  "How does {t} work?", "Write a poem about {t}.", "Who invented {t}?"])
    answer = f"I am a toy model and know nothing about {t}. Ask me about tandem or a small sum."
    return Turn("beyond its world", q.format(t=t), answer, "toy model")


GREET = {"Hello!": 0, "Hi!": 0, "Hi": 0, "Hello": 0, "Hey there!": 0, "Good morning!": 0, "Hey": 0,
         "Good evening!": 0, "How are you?": 1, "How are you today?": 1, "Are you well?": 1,
         "Thank you!": 2, "Thanks!": 2, "Thanks a lot.": 2, "Thank you very much.": 2,
         "Goodbye!": 3, "Bye!": 3, "See you later.": 3, "Good night!": 3, "Bye bye": 3}
REPLY = ["Hello! I am tandem-nano, a toy model. How can I help you?",
         "I am well, thank you. How can I help you?",
         "You are welcome!", "Goodbye! Have a nice day."]


def greeting(r):
    q = r.choice(list(GREET))
    return Turn("greetings", q, REPLY[GREET[q]], REPLY[GREET[q]])


def tell_name(r, name):
    return r.choice(["My name is {n}.", "I am {n}.", "Hi, I am {n}.", "Hello, my name is {n}.",
                     "Call me {n}.", "Hi! My name is {n}."]).format(n=name)


def memory(r):
    """The user tells something; after another turn or none the model is asked for it."""
    name = r.choice(W.NAMES)
    thing = r.choice(list(W.FAVORITES))
    value = r.choice(W.FAVORITES[thing])
    city = r.choice(W.CITIES)
    told_name = (tell_name(r, name), f"Nice to meet you, {name}!")
    told_thing = (r.choice([f"My favorite {thing} is {value}.", f"I like {value}. It is my favorite {thing}."]),
                  f"I will remember that your favorite {thing} is {value}.")
    told_city = (r.choice([f"I live in {city}.", f"My home is in {city}.", f"I am from {city}."]),
                 f"I will remember that you live in {city}.")
    asks = {"name": (r.choice(["What is my name?", "Do you remember my name?", "Who am I?",
                               "Can you tell me my name?", "What am I called?"]),
                     f"Your name is {name}."),
            "thing": (r.choice([f"What is my favorite {thing}?", f"Do you know my favorite {thing}?",
                                f"Which {thing} do I like best?"]),
                      f"Your favorite {thing} is {value}."),
            "city": (r.choice(["Where do I live?", "Which city do I live in?",
                               "Do you remember where I live?", "In which city is my home?"]),
                     f"You live in {city}.")}
    told = {"name": told_name, "thing": told_thing, "city": told_city}
    keys = r.sample(list(told), r.choice([1, 2, 2]))
    turns = [told[k] for k in keys]
    if r.random() < 0.3:
        other = r.choice([addition, capital, spelling, opposite])(r)
        turns.append((other.question, other.answer))
    before = []
    for q, a in turns:
        before += [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
    q, a = asks[r.choice(keys)]
    return Turn("memory", q, a, a, before=before)


def story(r):
    name, friend = r.sample(W.NAMES, 2)
    beast = r.choice("fox dog cat bear rabbit mouse owl duck horse wolf".split())
    place = r.choice("forest garden village castle mountain river farm island".split())
    thing = r.choice("key book lamp bell apple map coin box ring star".split())
    trait = r.choice("small brave happy kind clever quiet young lonely".split())
    place_in = {"mountain": "on a mountain", "river": "by a river", "farm": "on a farm",
                "island": "on an island"}.get(place, f"in a {place}")
    start = r.choice(["Once upon a time", "Long ago", "One summer", "One cold winter"])
    find = r.choice([f"found an old {thing} under a tree", f"saw a golden {thing} in the water",
                     f"lost a {thing} in the snow", f"was given a silver {thing}"])
    middle = r.choice([f"A friend named {friend} came to help.",
                       f"{friend} heard about it and came at once.",
                       f"{friend} said: \"Let us go together.\""])
    turn = r.choice(["They walked all day and did not give up.", "The way was long and dark.",
                     "It began to rain, but they went on.", "They asked the old owl for advice.",
                     "They sang songs so that they were not afraid."])
    end = r.choice([f"In the end {name} was happy, and they shared the {thing}.",
                    f"At last they came home, and {name} slept well.",
                    f"From that day on {name} and {friend} were the best of friends.",
                    f"And {name} never forgot that day."])
    text = (f"{start} there was a {trait} {beast} named {name} who lived {place_in}. "
            f"One day {name} {find}. {middle} {turn} {end}")
    q = r.choice(["Tell me a short story about a {b} named {n}.", "Write a story about a {b} named {n}.",
                  "Tell me a story about {n} the {b}.", "Please tell a story about a {b} called {n}.",
                  "Write a short story about a {b} called {n}."]).format(b=beast, n=name)
    return Turn("stories", q, text, f"{beast} named {name}")


# ---- tools ------------------------------------------------------------------------------

def tool(name, description, **params):
    return {"type": "function", "function": {
        "name": name, "description": description,
        "parameters": {"type": "object",
                       "properties": {k: {"type": t} for k, t in params.items()},
                       "required": list(params)}}}


TOOLS = {
    "get_weather": (tool("get_weather", "Get the weather of a city", city="string"),
                    ["What is the weather in {city}?", "How is the weather in {city}?",
                     "Tell me the weather in {city}.", "Is it raining in {city}?"]),
    "get_time": (tool("get_time", "Get the local time of a city", city="string"),
                 ["What time is it in {city}?", "Tell me the time in {city}.",
                  "What is the local time in {city}?", "How late is it in {city}?"]),
    "find_book": (tool("find_book", "Find a book in the library", title="string"),
                  ["Find the book {title}.", "Do you have the book {title}?",
                   "Look for the book {title}.", "Search the library for {title}."]),
    "send_message": (tool("send_message", "Send a message to a person", to="string", text="string"),
                     ["Send a message to {to}: {text}", "Write to {to}: {text}",
                      "Tell {to} this: {text}", "Message {to}: {text}"]),
    "set_timer": (tool("set_timer", "Set a timer", minutes="integer"),
                  ["Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
                   "Wake me in {minutes} minutes.", "I need a timer for {minutes} minutes."]),
}


def tool_args(r, name):
    pick = {"city": r.choice(W.CITIES), "title": " ".join(r.sample(W.WORDS, 2)), "to": r.choice(W.NAMES),
            "text": " ".join(r.sample(W.WORDS, 3)), "minutes": r.randrange(1, 60)}
    props = TOOLS[name][0]["function"]["parameters"]["properties"]
    return {k: pick[k] for k in props}


def tool_call(r):
    name = r.choice(list(TOOLS))
    others = r.sample([n for n in TOOLS if n != name], r.choice([0, 0, 0, 1]))
    offered = r.sample([name] + others, 1 + len(others))
    args = tool_args(r, name)
    call = {"name": name, "arguments": args}
    return Turn("tool calls", r.choice(TOOLS[name][1]).format(**args), "",
                json.dumps(call), tools=[TOOLS[n][0] for n in offered], call=call)


def tool_result(r):
    """A call and its result have gone before; the model reports the result."""
    name = r.choice(["get_weather", "get_time", "set_timer"])
    args = tool_args(r, name)
    call = {"type": "function", "id": "call_0", "function": {"name": name, "arguments": args}}
    if name == "get_weather":
        sky, t = r.choice(["sunny", "cloudy", "rainy", "windy", "snowy"]), r.randrange(0, 35)
        result = {"sky": sky, "temperature": t}
        answer = f"It is {sky} in {args['city']}, at {t} degrees."
    elif name == "get_time":
        time = f"{r.randrange(24)}:{r.randrange(60):02d}"
        result, answer = {"time": time}, f"It is {time} in {args['city']}."
    else:
        result, answer = {"ok": True}, f"The timer is set for {args['minutes']} minutes."
    before = [{"role": "user", "content": r.choice(TOOLS[name][1]).format(**args)},
              {"role": "assistant", "content": "", "tool_calls": [call]},
              {"role": "tool", "content": json.dumps(result)}]
    return Turn("tool results", "", answer, answer, tools=[TOOLS[name][0]], before=before)


# ---- tandem -----------------------------------------------------------------------------

def tandem_maker(facts, frames):
    def tandem(r):
        key, answer, questions = r.choice(facts)
        q = r.choice(questions)
        lower = q if q.startswith(("I ",)) else q[0].lower() + q[1:]
        return Turn("tandem", r.choice(frames).format(q=q, l=lower), answer, key)
    return tandem


# ---- conversations ----------------------------------------------------------------------

# kind weights: how often a turn of the kind is drawn
WEIGHTS = [(addition, 10), (subtraction, 10), (multiplication, 5), (spelling, 7), (letters, 6),
           (first_last, 3), (count_words, 3), (sorting, 7), (count_up, 3), (compare, 4), (parity, 2),
           (repeat, 5), (capital, 5), (opposite, 4), (plural, 4), (definition, 5), (animal, 1.5),
           (color, 1.5), (calendar, 3), (beyond, 4), (greeting, 2), (memory, 5), (story, 2),
           (tool_call, 4), (tool_result, 1.5)]
TANDEM_WEIGHT = 17

SYSTEMS = ["You are a helpful assistant.", "You are tandem-nano.", "Be brief.",
           "You are a helpful model that runs on tandem.", "Answer the question."]


class Maker:
    """Draws turns and conversations from one seeded generator."""

    def __init__(self, facts, frames, seed):
        self.r = random.Random(seed)
        pairs = WEIGHTS + [(tandem_maker(facts, frames), TANDEM_WEIGHT)]
        self.makers, self.weights = zip(*pairs)

    def turn(self, want_held_out=False):
        while True:
            t = self.r.choices(self.makers, self.weights)[0](self.r)
            if held_out(t) == want_held_out:
                return t

    def conversation(self, max_turns=1):
        """Messages, tools and whether thinking is on, for the chat template."""
        n = 1 if self.r.random() < 0.75 else self.r.randint(1, max_turns)
        thinking = self.r.random() < 0.07
        messages, tools = [], []
        if self.r.random() < 0.1:
            messages.append({"role": "system", "content": self.r.choice(SYSTEMS)})
        for i in range(n):
            t = self.turn()
            while i and (t.before or t.tools):
                t = self.turn()
            tools = tools or t.tools
            messages += t.before
            if t.question:
                messages.append({"role": "user", "content": t.question})
            messages.append(answer_message(t, thinking and i == n - 1))
        return {"messages": messages, "tools": tools or None, "enable_thinking": thinking}


def answer_message(t: Turn, thinking: bool):
    m = {"role": "assistant", "content": t.answer}
    if t.call:
        m["tool_calls"] = [{"type": "function", "id": "call_0", "function": t.call}]
    if thinking:
        m["reasoning_content"] = t.think or "This is easy."
        if t.think:
            m["content"] = t.expect
    return m
