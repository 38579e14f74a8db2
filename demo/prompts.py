"""The demo's prompts: real text, written for this demo, each longer than one chunk of 256 tokens.

Five share a long system text. Its end lies inside a block, and the last whole block before it ends inside a chunk (for
blocks of 128 or less): an engine with prefix caching starts the second request in the middle of a chunk, so that this
chunk is captured as a piece and the reader has to join it with what the first request left.
The others have nothing in common with them or with each other: prose, a technical description, code, numbers, German,
Chinese, a recipe, a dialogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt as it is given to the tokenizer, the chat template's markers included where it has any."""

    name: str
    text: str


def tokenize(tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of every prompt by name, in the order of PROMPTS, by a transformers tokenizer of the model.

    Nothing is added (no BOS): what is asked of the engine, of the reference and of the store is this one list.
    """
    return {
        prompt.name: list(tokenizer.encode(prompt.text, add_special_tokens=False))
        for prompt in PROMPTS
    }


def _chat(system: str, question: str) -> str:
    """SmolLM2's chat template, written out, so that the text alone says everything."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


HARBOUR = """\
You are the duty assistant of the harbour office in Oskerhaven, a small port on a tidal estuary. Keep to what this page \
says; if the answer is not here, say so and name the harbour master's telephone hours, 8 to 11 on working days.

Water. High water stands about six hours and twelve minutes apart from low water. At the sill of the inner basin there \
are 4.1 metres at mean high water and 1.3 metres at mean low water. The gate opens ninety minutes before high water and \
closes ninety minutes after it. With wind from the north-west above force seven it stays shut, because the swell breaks \
on the sill.

Berths. The inner basin has 46 berths. Numbers 1 to 12 belong to the fishing fleet and are never given to visitors. \
Visitors pay 1.80 per metre and night, electricity and water included, children under twelve and dogs free. Who stays \
for a week pays for six nights. Boats longer than 18 metres lie at the outer quay, where there is no electricity, and pay \
1.10 per metre and night.

Fish. The auction begins at half past six on Tuesdays, Thursdays and Saturdays. Boats must have landed by six. Boxes \
carry a blue tag with the boat's number, the species and the hour of the haul; boxes without a tag are not sold. Ice is \
free for boats that sell here and costs 9 per barrow for all others.

Ferry. The ferry to Little Osk leaves at every full hour from seven to nineteen, except at thirteen, when the crew \
eats. Bicycles travel free, but not more than ten at once.

Noise and light. Engines that charge batteries must be silent from 22 to 7. Searchlights may not be pointed at the \
houses on the dyke. Complaints are written down with name, hour and berth, and are answered within five days."""

_STORY = """\
The clock above the grain exchange had been eleven minutes slow for as long as anyone could remember, and the town had \
made its peace with that. Trains were met, bread was baked and lovers were forgiven by the slow clock; only the doctor, \
who came from elsewhere, wore a watch. So when the council received a small inheritance on condition that it be spent \
"on the exactness of public things", there was an embarrassed silence, and then somebody proposed to repaint the weights \
at the market. They sent for a clockmaker instead.

She arrived with the noon train, which is to say at eleven minutes to twelve by the tower, and carried a single wooden \
case with rope handles. Her name was Ilse Marrander. She asked for a ladder, a lamp and somebody who was not afraid of \
pigeons, and was given the baker's second son, Jory, who was afraid of nothing because he had not yet tried much.

Inside the tower it smelled of dust, oil and old rain. The movement stood in an iron frame as big as a bed. Ilse did not \
touch it. She sat down on an upturned bucket and listened, for the better part of an hour, with her chin in her hand, \
while Jory counted pigeons and lost count and started again.

"There is nothing wrong with it," she said at last.

"But it is slow," said Jory.

"It is late. That is something else. A slow clock falls behind a little more every day. This one has kept perfect time \
for sixty years. Somebody set it back by eleven minutes, once, and it has been faithful to that ever since."

They found the reason on the back of the frame, where a sentence had been scratched with a nail, in a small, upright \
hand: *Wait for him, he was never punctual.* Below it stood a date, and a name that both of them had to bring close to \
the lamp. It was the name of the woman who had left the money.

Jory wanted to run down and tell everybody at once. Ilse held him by the sleeve. She explained that a clock can be put \
right in a moment, a single turn of the hand will do it, but that it cannot be put wrong again for the same reason; the \
reason would be gone. She asked him what he thought the town had been hearing, all those years, when the bell rang late.

He thought about it. He thought of his grandmother, who had been the postmistress, and who used to say that the evening \
mail always came in good time. He thought of the old man who sat on the bench in front of the exchange every Friday with \
a bunch of something in his hand, whatever the season had, and who looked up at the dial and never seemed to be worried.

"Did he come?" Jory asked. "The one who was never punctual?"

"That," said Ilse, and began to oil the bearings, since she had been paid for exactness and did not like to leave with \
clean hands, "is a question for the man on the bench."

It was Friday. They went down together, and as they crossed the square the bell above them struck the hour, eleven \
minutes late and exactly on time. What did the old man tell them?"""

_TECHNICAL = """\
Explain to a careful beginner how the following machine works, and say at which point most of the energy is lost.

A compression heat pump moves heat from a cold place to a warm one by letting a liquid boil where it is cold and condense \
where it is warm. Four parts form a closed ring: an evaporator, a compressor, a condenser and an expansion valve. In the \
evaporator the refrigerant is at low pressure, so its boiling point lies below the temperature of the outside air; air at \
2 degrees Celsius is warm enough to boil a fluid that boils at minus 8. Boiling takes up the latent heat, about 200 \
kilojoules for each kilogram in a common refrigerant, while the temperature of the fluid hardly changes. The compressor \
draws off the vapour and raises its pressure from roughly 3 to roughly 20 bar. Compression heats the vapour to some 70 \
degrees, which is now warmer than the water of the heating circuit. In the condenser it gives its heat to that water, \
first by cooling down, then by condensing, and in the end by cooling a little further as a liquid. The expansion valve \
lets the warm liquid back to the low pressure; part of it flashes into vapour at once and cools the rest, and the ring is \
closed.

The useful number is the coefficient of performance: heat delivered divided by electrical work put in. Its upper limit is \
set by the two temperatures, T_hot / (T_hot - T_cold), both in kelvin. Between 265 K and 308 K that limit is 7.2; real \
machines reach a bit more than half of it, because the heat exchangers need a difference in temperature to work at all, \
because the compressor has friction, and because throttling in a valve gives away work that a turbine could have won \
back. Each degree by which the heating water may be cooler improves the coefficient by about two and a half per cent, \
which is why wide floor heating suits these machines better than small radiators.

In damp cold weather ice grows on the evaporator. The control then reverses the ring for a few minutes, takes heat out of \
the house, and thaws the ice; a well-kept machine does so about once an hour at two degrees and hardly ever at minus ten, \
since very cold air carries little water."""

_CODE = '''\
Review this module. Name every input for which it gives a wrong answer, and propose the smallest change for each.

```python
"""A bounded queue of timed jobs: the earliest job comes first, equal times keep their order."""

import heapq
import itertools
from dataclasses import dataclass, field


class QueueFull(Exception):
    pass


@dataclass(order=True)
class Job:
    due: float
    number: int
    name: str = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class TimedQueue:
    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._capacity = capacity
        self._heap: list[Job] = []
        self._by_name: dict[str, Job] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, name: str, due: float) -> Job:
        if len(self._heap) >= self._capacity:
            raise QueueFull(name)
        job = Job(due, next(self._numbers), name)
        heapq.heappush(self._heap, job)
        self._by_name[name] = job
        return job

    def cancel(self, name: str) -> bool:
        job = self._by_name.pop(name, None)
        if job is None:
            return False
        job.cancelled = True
        return True

    def pop_due(self, now: float) -> list[Job]:
        due = []
        while self._heap and self._heap[0].due <= now:
            job = heapq.heappop(self._heap)
            if not job.cancelled:
                due.append(job)
                del self._by_name[job.name]
        return due

    def next_due(self) -> float | None:
        return self._heap[0].due if self._heap else None
```

Hints: think of two jobs with one name, of cancelled jobs that still count, and of a `due` that is not a number.
'''

_NUMBERS = """\
Find the two rows in which the logger must have been wrong, and say by which rule you found them.

station;date;hour;level_cm;flow_m3s;temp_C;battery_V
K-17;2031-03-04;00:00;142;18.36;4.2;12.61
K-17;2031-03-04;01:00;143;18.71;4.1;12.60
K-17;2031-03-04;02:00;145;19.44;4.1;12.60
K-17;2031-03-04;03:00;149;20.93;4.0;12.59
K-17;2031-03-04;04:00;156;23.67;3.9;12.59
K-17;2031-03-04;05:00;165;27.38;3.9;12.58
K-17;2031-03-04;06:00;177;32.66;3.8;12.58
K-17;2031-03-04;07:00;188;37.85;3.8;12.57
K-17;2031-03-04;08:00;1960;41.81;3.9;12.63
K-17;2031-03-04;09:00;201;44.36;4.1;12.78
K-17;2031-03-04;10:00;203;45.40;4.4;12.95
K-17;2031-03-04;11:00;202;44.88;4.8;13.08
K-17;2031-03-04;12:00;198;42.83;5.1;13.14
K-17;2031-03-04;13:00;193;40.31;5.3;13.15
K-17;2031-03-04;14:00;187;37.37;5.4;13.11
K-17;2031-03-04;15:00;181;34.51;5.4;13.02
K-17;2031-03-04;16:00;175;31.75;-5.3;12.90
K-17;2031-03-04;17:00;170;29.51;5.1;12.79
K-17;2031-03-04;18:00;166;27.80;4.9;12.72"""

_GERMAN = """\
Fasse den folgenden Brief in drei Sätzen zusammen und schlage eine höfliche Antwort vor.

Sehr geehrte Damen und Herren der Stadtbücherei,

seit vierzig Jahren leihe ich bei Ihnen Bücher aus, und noch nie habe ich mich beschwert, nicht einmal, als der \
Lesesaal wegen der Überschwemmung ein halbes Jahr geschlossen war. Heute muss ich es tun. Am Dienstag wollte ich den \
zweiten Band der „Geschichte der Brückenbauer“ zurückgeben. Der neue Automat neben der Treppe hat das Buch angenommen, \
ein freundliches Geräusch von sich gegeben und mir eine Quittung gedruckt, auf der steht, ich hätte eine Gießkanne \
abgegeben. Zwei Tage später bekam ich eine Mahnung: Das Buch sei überfällig, die Gebühr betrage 1,50 Euro, und für die \
Gießkanne möge ich mich bitte an den Verleih für Gartengeräte im Untergeschoss wenden.

Ich bin dort gewesen. Der junge Mann war sehr hilfsbereit, konnte aber keine Gießkanne finden, die zu meiner Quittung \
passt, und ohne Gießkanne lässt sich der Vorgang nicht schließen. Nun könnte ich natürlich eine Gießkanne kaufen und \
sie zurückgeben; das erscheint mir jedoch, bei aller Wertschätzung für Ihre Ordnung, als der falsche Weg. Außerdem \
fürchte ich, dass der Automat sie für den dritten Band halten würde.

Mit freundlichen Grüßen
Friederike Öttinghaus"""

_CHINESE = """\
请用英文概括下面这段文字，并说明老人为什么最后笑了。

村口有一座石桥，桥下的水到了冬天就浅得露出石头。老人每天清晨都坐在桥头，看着孩子们背着书包走过去，傍晚再看着他们走回来。\
有一天，一个新来的小女孩停下来问他：“爷爷，您在等谁？”老人想了想，说：“我在数桥上的石板。”“一共有多少块？”\
“早上是九十六块，晚上是九十七块。”小女孩不相信，放下书包，从这头数到那头，又从那头数回来。她数了三遍，每一遍都不一样。\
第二天，她带来了两个同学；第三天，全班都来了。他们用粉笔在每块石板上写数字，写到桥的中间，忽然下起雨来，数字都流进了河里。\
孩子们躲在老人的伞下，吵着明天要重新开始。老人望着空荡荡的桥，笑了起来。"""

_RECIPE = """\
Rewrite this recipe for twelve people instead of four, in metric units, and put the steps into the order in which one \
cook with a single oven should do them.

Barley with roasted roots. Soak one cup of pearl barley overnight. Heat the oven to 400 degrees Fahrenheit. Peel three \
carrots, two parsnips and a small celeriac, cut them into pieces as thick as a thumb, turn them in two tablespoons of \
oil with a teaspoon of caraway and a good pinch of salt, and roast them for 35 minutes, shaking the tray once. Meanwhile \
soften an onion in butter, add the drained barley, stir until it smells of nuts, pour in three cups of hot stock, and \
let it simmer under a lid for half an hour. Toast half a cup of hazelnuts in the oven during the last eight minutes of \
the roots, rub off the skins in a cloth and chop them. Stir a tablespoon of vinegar, a spoonful of mustard and a handful \
of chopped parsley into the barley, fold in the roots, and scatter the nuts on top. It is good warm, and better on the \
next day, when it has become a salad; in that case keep the nuts in a jar until you serve it, or they turn soft. Serves \
four as a meal, six beside something else."""

_DIALOGUE = """\
<|im_start|>system
You help two people who repair a bicycle over the telephone. Answer in one short paragraph.<|im_end|>
<|im_start|>user
The chain of my bicycle jumps whenever I push hard on the pedals. It is a nine-speed cassette, the chain is new since \
last week, and it only happens on the three smallest sprockets.<|im_end|>
<|im_start|>assistant
That is the usual sign of worn sprockets: the old chain had stretched, and the teeth of the small sprockets, which carry \
the most load per tooth, have worn to fit it. A new chain has a shorter pitch and rides up on those teeth. Look at them \
from the side; if they are hooked like a wave about to break, change the cassette.<|im_end|>
<|im_start|>user
I looked. The teeth seem fine, all the same height and straight. But when I turn the pedals backwards by hand, one link \
makes a small kink just before it reaches the derailleur.<|im_end|>
<|im_start|>assistant
Then it is a stiff link, most likely the one that was closed when the chain was fitted. Put the chain on the smallest \
ring, find the link that does not straighten, and bend it sideways with both thumbs, gently, until it moves as freely as \
its neighbours. Put a drop of oil on it afterwards.<|im_end|>
<|im_start|>user
The link moves freely now and the kink is gone. It still jumps, although less often, and I noticed that the derailleur \
cage is not parallel to the wheel: seen from behind, its lower end leans towards the spokes by about a finger's width. \
The bicycle fell on its right side in winter. Is that the cause, can I straighten it myself without breaking something, \
and how do I check that it is straight afterwards?<|im_end|>
<|im_start|>assistant
"""

PROMPTS: tuple[Prompt, ...] = (
    Prompt(
        "harbour-ferry",
        _chat(HARBOUR, "When does the last ferry leave before lunch, and is my bicycle welcome?"),
    ),
    Prompt(
        "harbour-berth",
        _chat(
            HARBOUR,
            "We are two adults, three children of four, nine and thirteen, and a dog, on a boat of 11.60 metres with a "
            "draught of 1.7 metres. We would like to come in on Monday evening and stay until the Monday after. Which "
            "berths may we take, at what state of the tide can we cross the sill, and what will the week cost us?",
        ),
    ),
    Prompt(
        "harbour-complaint",
        _chat(
            HARBOUR,
            "I live in the third house on the dyke and have not slept since the day before yesterday. First there was a "
            "generator. It ran until a quarter to one in the night, stopped, and began again at half past five, when "
            "the gulls had just finished. Then somebody at the outer quay discovered that his searchlight can be turned "
            "in a full circle, and for the length of a whole evening my bedroom was a lighthouse. I put on my coat and "
            "went to look. The boat is grey, about twenty metres long, with a wheelhouse far aft and a name that I could "
            "not read, because the light was in my eyes. A man on deck told me that he has no electricity at his place "
            "and must charge his batteries somehow, that nobody told him about any rule, and that he will stay until "
            "the wind turns. I do not want him punished. I want to sleep. Please write my complaint down in the form "
            "that you need, tell me which of the two things he did is against the rules and which is merely unkind, and "
            "by when I can expect an answer. My name is Tamsin Vries, and it was berth O-3, if the painted sign is "
            "still right.",
        ),
    ),
    Prompt(
        "harbour-fish",
        _chat(
            HARBOUR,
            "Our boat hauled at 3:40, 4:15 and 5:05 and will be alongside at ten to six on Thursday. The tags for the "
            "last haul got wet and we have nothing to write on. Can we sell those boxes, do we pay for ice, and could "
            "the gate be shut on us with the wind at north-west six?",
        ),
    ),
    Prompt("harbour-weather", _chat(HARBOUR, "Will it rain tomorrow?")),
    Prompt("story", _STORY),
    Prompt("heat-pump", _TECHNICAL),
    Prompt("code-review", _CODE),
    Prompt("numbers", _NUMBERS),
    Prompt("german-letter", _GERMAN),
    Prompt("chinese-bridge", _CHINESE),
    Prompt("recipe", _RECIPE),
    Prompt("dialogue", _DIALOGUE),
)
