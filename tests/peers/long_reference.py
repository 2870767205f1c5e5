#!/usr/bin/env python3
"""Writes a reference run over a prompt that is longer than a sliding window: `long_reference.py PROGRAM MODEL OUT [--f32]`.

PROGRAM is what llama_cpp.py built and MODEL a GGUF file; OUT gets the vectors. With --f32 the KV cache is f32 and attention is
computed step by step: for a model that `PROGRAM requantise` made f32. The prompt is put together from the sentences below by a
fixed sequence of numbers, so it is the same each time. Uses only Python's own library.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from llama_cpp import PACKAGE, VERSION

STEPS = 64
THREADS = 1
# Tokens known, inside the prompt: where a window of 512 has just begun to leave tokens out, then further on, to near the end.
INSIDE = [513, 600, 777, 1000, 1234, 1400, 1700, 2000]
DAYS = 26

OPENING = (
    "This is the day book of the harbour at Tarn Head, kept by Ida Brookner, who took the post in March. "
    "The key of the tide house hangs behind the blue clock, and its number is seven hundred and fourteen. "
    "Whoever reads this later should know that the crane was painted green, and that it never worked on a Sunday."
)
WEATHER = [
    "Fog until noon, then a pale sun and hardly any wind.",
    "Rain came in from the west before it was light and stayed.",
    "A hard frost; the ropes were stiff and the steps had to be salted twice.",
    "Clear and warm, with a breeze that turned south after dinner.",
    "The wind rose all day, and by evening nobody could hear the bell.",
    "Low cloud, no rain, and a swell that made the pontoons groan.",
    "Bright and cold. One could count the windows of the lighthouse from here.",
]
SHIPS = [
    ("Margaret Lane", "barley"),
    ("Old Fidelity", "roof slates"),
    ("Sandpiper", "crates of oranges"),
    ("Northern Hope", "timber"),
    ("Little Agnes", "salt and candles"),
    ("Quiet Harriet", "machine parts"),
    ("Two Brothers", "sacks of flour"),
    ("Evening Star", "glass bottles packed in straw"),
]
ARRIVALS = [
    "The {ship} came in with {count} tons of {cargo} and left again on the night tide.",
    "We waited for the {ship} until four; her {cargo} had shifted, and she lay {count} degrees over.",
    "The {ship} unloaded {cargo} at the north quay, which took {count} men the whole morning.",
    "Nothing moved except the {ship}, bound up the coast with {count} boxes of {cargo}.",
]
PEOPLE = ["Tom Averill", "the pilot's widow", "old Mr. Senn", "the new clerk", "Doctor Pryce", "a boy called Wick", "the chaplain"]
EVENTS = [
    "{person} asked whether the dredger would be back by spring, and I said that I had been told so, which is not the same.",
    "{person} found a brass button in the mud, with an anchor on it and the letters R and K.",
    "At the weighing there was a quarrel about {count} pounds; {person} settled it by weighing himself.",
    "{person} has begun to teach the children knots, and they now tie up everything that stands still.",
    "I paid {person} {count} shillings for mending the lantern, although it still smokes when the door is open.",
    "{person} believes that the gulls know the hour; I have watched them for a week, and they are late more often than I am.",
    "A letter came for {person} from abroad, and was read aloud in the kitchen, twice, because of the good part.",
    "{person} wants to know why a wave that breaks is louder than two that do not; I wrote the question down for the school.",
]
THOUGHTS = [
    "If a pump lifts {count} buckets in an hour, then three pumps lift {triple}; but only while all three of them have somebody awake.",
    "Accounts: rope {count}, lamp oil {half}, bread and cheese 9, sundries 4. The total is {total}.",
    "I measured the quay again: {count} paces from the steps to the crane, and the same number back, which is a comfort.",
    "It seems to me that a harbour is mostly a place for waiting, and that the work is what one does so as not to notice.",
    "Must remember: new hinges, {count} fathoms of line, and a kind word to the night watch.",
    "The ledger says {count} and the slate says {half}; one of them was written after supper.",
]
CLOSING = (
    "Before I close the book for the winter I will write down what I said on its first page, so that nobody has to turn back. "
    "The book is that of the harbour at Tarn Head, the crane was painted green, and the key of the tide house hangs behind the"
)


class Numbers:
    """The same sequence each time: the upper bits of a multiplicative generator."""

    def __init__(self):
        self.state = 20_250_117

    def below(self, limit):
        self.state = (self.state * 48_271) % 2_147_483_647
        return (self.state >> 8) % limit

    def one_of(self, values):
        return values[self.below(len(values))]


def capitalised(text):
    return text[0].upper() + text[1:]


def day(numbers, number):
    ship, cargo = numbers.one_of(SHIPS)
    count = 6 + numbers.below(80)
    values = {"ship": ship, "cargo": cargo, "count": count, "triple": 3 * count, "half": count // 2}
    values |= {"total": count + count // 2 + 13, "person": numbers.one_of(PEOPLE)}
    chosen = [numbers.one_of(texts) for texts in (WEATHER, ARRIVALS, EVENTS, THOUGHTS)]
    lines = [capitalised(text.format(**values)) for text in chosen]
    # Not every day has everything.
    del lines[1 + numbers.below(3)]
    return f"Day {number}. " + " ".join(lines)


def prompt():
    numbers = Numbers()
    return "\n\n".join([OPENING, *(day(numbers, number) for number in range(1, DAYS + 1)), CLOSING])


def ask(*command):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(map(str, command))}` exited with {done.returncode}")
    return done.stdout


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--f32"]
    exact = len(arguments) + 1 < len(sys.argv)
    if len(arguments) != 3:
        sys.exit(__doc__)
    program, model, out = arguments
    text = prompt()
    with tempfile.TemporaryDirectory() as folder:
        text_file, ids_file = Path(folder) / "text", Path(folder) / "ids"
        text_file.write_text(text)
        ids_file.write_text(ask(program, "tokenise", model, text_file))
        options = ["--threads", THREADS, "--at", ",".join(map(str, INSIDE)), *(["--f32"] if exact else [])]
        run = ask(program, "reference", model, ids_file, STEPS, *options)
    name = Path(model).name
    head = {
        "label": f"{name}, llama.cpp " + ("in f32" if exact else "defaults") + ", a prompt of several windows",
        "model": name,
        "engine": f"llama.cpp from {PACKAGE} {VERSION} sdist",
        "kv": "f32" if exact else "f16",
        "n_threads": THREADS,
        "note": "greedy argmax, ties to lowest id; margin = logit(top1)-logit(top2); logprobs natural log over full vocab;"
        " generation stops after an end-of-generation id (included); top5_inside: [tokens known, top 5 of the next one]",
    }
    lines = json.dumps(head, separators=(",", ":"))[:-1]
    case = json.dumps({"name": "long", "prompt": text}, separators=(",", ":"))[:-1]
    written = f'{lines},\n"prompts":[\n{case},\n {run.strip()[1:]}\n]}}\n'
    known = len(json.loads(written)["prompts"][0]["prompt_ids"])
    Path(out).write_text(written)
    print(f"{out}: {known} tokens of prompt")


if __name__ == "__main__":
    main()
