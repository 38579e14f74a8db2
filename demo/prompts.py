"""The demo's prompts: real text, written for this demo, each longer than one chunk of 256 tokens.

Four share a long system text. Its end lies inside a block, and the last whole block before it ends inside a chunk (for
blocks of 128 or less): an engine with prefix caching starts the second request in the middle of a chunk, so that this
chunk is captured as a piece and the reader has to join it with what the first request left.
The others have nothing in common with them or with each other: code, numbers, German, Chinese.
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
    Prompt("code-review", _CODE),
    Prompt("numbers", _NUMBERS),
    Prompt("german-letter", _GERMAN),
    Prompt("chinese-bridge", _CHINESE),
)
