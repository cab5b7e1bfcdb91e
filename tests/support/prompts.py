"""Texts for the tests against real models: five kinds of 64 tokens or more, the last about 700 of plain prose."""

from __future__ import annotations

FACT = (
    "The capital of France is Paris. The capital of Spain is Madrid. The capital of Portugal is Lisbon. The capital "
    "of Austria is Vienna. The capital of Greece is Athens. The capital of Norway is Oslo. The capital of Finland is "
    "Helsinki. The capital of Ireland is Dublin. The capital of Poland is Warsaw. The capital of Hungary is Budapest. "
    "The capital of Sweden is Stockholm. The capital of Denmark is Copenhagen. The capital of Italy is"
)

CHAT = (
    "<|im_start|>system\nYou answer briefly, in plain words, and say so when you do not know.<|im_end|>\n"
    "<|im_start|>user\nWhy does ice float on water?<|im_end|>\n"
    "<|im_start|>assistant\nWater widens when it freezes, so a piece of ice weighs less than the water it pushes "
    "aside.<|im_end|>\n<|im_start|>user\nAnd why does a steel ship not sink?<|im_end|>\n<|im_start|>assistant\n"
)

CODE = (
    "def mean(values: list[float]) -> float:\n"
    '    """Return the arithmetic mean, 0.0 for an empty list."""\n'
    "    if not values:\n        return 0.0\n    return sum(values) / len(values)\n\n\n"
    "def median(values: list[float]) -> float:\n"
    '    """Return the middle of the sorted values, 0.0 for an empty list."""\n'
    "    if not values:\n        return 0.0\n    values = sorted(values)\n    return"
)

MIXED = (
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich; 日本語も少し。 x² + y² = r², naïve café №7 🙂: "
    "Съешь же ещё этих мягких французских булок, πάντα ῥεῖ, 1 234,56 € or $78.90?"
)

STORY = """\
The lighthouse keeper had counted the steps so often that he no longer noticed counting. There were one hundred and
eighty-four of them, and the eleventh from the top was cracked. On the evening when the fog came in from the north he
stopped on that step, because the sound of the sea had changed. It was lower than usual, as if someone had put a hand
over it.

He lit the lamp and wrote the hour in the book. The page before held his brother's writing, round and careful, and the
page before that his father's. Nobody in the family had ever missed a night. The rule was older than the tower: a light
had burned on the rock when there was nothing here but a hut, an iron basket and a heap of driftwood under a tarpaulin.

A little after nine a bell rang. There was no bell on the rock. The nearest one hung in the chapel of Saint Brannoc,
seven miles away across the bay, and it had been silent since its rope rotted. The keeper opened the window and leaned
out. The beam passed over his head, white and solid, and ended in the fog like a plank pushed into wool. The bell rang
again, closer, and with it came the smell of tar and oranges.

"Ahoy," said a voice below. It was a polite voice, rather tired. "Would you be so kind as to tell us what year it is?"

He told them. For a while nobody answered; he could hear a rope being hauled through a block, and a dog shaking itself.
Then the voice said that this was later than they had hoped, but earlier than they had feared, and asked whether the
harbour at Lanmoor still stood. He said that the harbour had silted up when his grandfather was a boy and that people
grew barley there now. Someone laughed. Someone else, perhaps a child, began to cry and was hushed.

The keeper thought about the lifeboat, and about the telephone in the kitchen, which had worked last Tuesday. He
thought about what he would write in the book. In the end he asked the only question that seemed useful, and called
down to find out what they needed. Water, the voice replied, and bread if there was any, and a chart drawn by somebody
who was still alive. He carried everything down in four journeys, past the cracked step, past the barometer that had
pointed to rain for eleven years, and lowered it over the edge in the basket that his father had used for coal. The
basket came up again with six oranges in it, and a coin so worn that neither face could be read.

By midnight the fog had gone. The sea lay flat and empty under the stars, the beam swept over it and found nothing, and
the bell of Saint Brannoc did not ring again. He put the coin on the windowsill, peeled one of the oranges, and sat down
to write. After the hour, the wind and the height of the barometer he hesitated for a long time. Then he dipped the pen
once more and wrote: visibility poor; one vessel, outward bound; all well. Underneath, because the rule said that
nothing might be left out, he added that the oranges were very good, and that he hoped they would find their way home
before
"""

PROMPTS = {"fact": FACT, "chat": CHAT, "code": CODE, "mixed": MIXED, "story": STORY}
