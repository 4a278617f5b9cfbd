"""A small readable world of needle-in-a-haystack questions: words, texts, tokenizer and training batches.

A haystack is made of plain English sentences of sixteen tokens. Facts stand between them, and a question is last:

    note : crimson harbor = seven amber nine delta ;          a fact: a key of two words has four value words
    link : silver orchard -> crimson harbor ;                 an alias: the first key stands for the second
    ask : crimson harbor =                                    answer: seven amber nine delta ;
    ask : silver orchard ->                                   answer: crimson harbor = seven amber nine delta ;

Every word is one token, so a text of n words and signs has exactly n tokens and one ``<bos>`` before them. Everything
follows from seeds. This file knows nothing about models; it never touches the disk.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TASKS = ("needle", "lookalike", "alias")

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
SIGNS = ("note", "link", "ask", ":", "=", "->", ";", ".")

KEY_FIRST = """
crimson silver golden scarlet azure ivory ebony emerald cobalt copper bronze marble velvet silken linen woolen leather
granite crystal frozen molten hollow hidden secret sacred ancient modern royal noble humble gentle savage mighty
slender lonely merry solemn silent roaring whispering dancing sleeping wandering burning shining glowing fading
drifting floating falling rising broken woven painted carved gilded polished rusty dusty muddy mossy sandy stony rocky
snowy icy stormy windy misty cloudy sunny moonlit starlit twilight northern southern eastern western arctic tropical
alpine coastal desert lunar solar stellar cosmic electric magnetic atomic thunderous peaceful restless fearless
ruthless timeless endless nameless weightless seamless flawless spotless ragged jagged crooked twisted tangled braided
striped spotted speckled freckled feathered scaled horned winged armored masked veiled hooded crowned haunted
enchanted forbidden forgotten vanished legendary mythical
""".split()

KEY_SECOND = """
harbor orchard castle lantern compass anchor tower bridge garden meadow canyon valley glacier volcano island lagoon
fountain temple palace fortress citadel cathedral chapel abbey monastery lighthouse windmill watermill granary stable
vineyard pasture prairie savanna jungle forest thicket grove marsh swamp bayou lowland estuary fjord gulf bay strait
channel reef atoll peninsula cape cliff ridge summit plateau mesa butte gorge ravine cavern grotto tunnel mine quarry
crater geyser spring waterfall rapids brook creek stream river lake pond reservoir ocean tide current whirlpool
tempest blizzard cyclone tornado monsoon drought eclipse aurora comet meteor planet galaxy nebula satellite rocket
shuttle airship glider galleon frigate schooner clipper raft canoe kayak ferry barge caravan chariot carriage sleigh
saddle scepter throne goblet chalice amulet talisman pendant locket brooch tiara diadem scabbard lyre obelisk pyramid
""".split()

VALUES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million dozen alpha bravo
charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec romeo sierra tango
uniform victor whiskey xray yankee zulu beta gamma epsilon zeta eta theta iota kappa lambda sigma omega omicron
upsilon amber ruby sapphire topaz opal pearl jade onyx garnet quartz agate jasper beryl coral diamond turquoise lion
tiger leopard cheetah jaguar panther lynx cougar wolf fox coyote jackal bear badger otter beaver weasel ferret mink
raccoon skunk squirrel chipmunk hedgehog mole rabbit hare mouse hamster gopher deer elk moose caribou bison buffalo
camel llama alpaca giraffe zebra horse donkey mule pony goat sheep lamb pig boar cow bull ox rhino hippo elephant
monkey gorilla lemur baboon koala kangaroo wombat panda sloth armadillo anteater eagle hawk falcon owl raven crow
magpie sparrow robin finch swallow pigeon dove pelican heron stork crane swan goose duck turkey peacock parrot penguin
puffin apple pear plum peach cherry apricot mango papaya banana orange lemon lime grape melon fig olive walnut almond
pecan cashew hazel ginger pepper garlic onion carrot potato tomato spinach lettuce cabbage radish turnip celery
pumpkin cinnamon clove nutmeg saffron thyme basil parsley mint oregano violin cello flute oboe trumpet tuba harp piano
guitar banjo drum mustard vanilla cocoa barley rice wheat oats rye maize bean pea lentil chickpea soy honey sugar
butter cheese cream yogurt bread pasta
""".split()

PEOPLE = """
sailor farmer teacher doctor baker miller tailor weaver potter mason carpenter plumber painter sculptor writer poet
singer dancer actor juggler clown soldier captain general admiral sergeant guard knight squire king queen prince
princess duke baron lawyer judge clerk banker merchant trader peddler porter driver pilot mechanic engineer chemist
scholar student pupil child girl boy woman man neighbor stranger traveler pilgrim hunter fisherman shepherd gardener
cook waiter butler maid nurse surgeon dentist priest monk bishop mayor senator beekeeper librarian gravedigger
blacksmith
""".split()

THINGS = """
basket bucket barrel bottle kettle teapot saucepan plate bowl spoon fork knife napkin tablecloth candle lamp mirror
curtain carpet blanket pillow mattress cradle chair bench table desk drawer cupboard wardrobe bookshelf ladder hammer
chisel saw shovel rake wheelbarrow plow scythe rope chain hook nail needle thread button ribbon buckle belt jacket
coat scarf glove mitten boot sandal slipper hat cap helmet umbrella parcel letter envelope stamp newspaper magazine
notebook pencil crayon brush canvas photograph calendar clock watch bell whistle radio telephone typewriter camera
telescope microscope wagon bicycle cart trolley suitcase backpack purse wallet coin ticket map passport flag banner
poster painting statue vase puzzle kite doll marionette balloon hourglass toolbox birdcage doorbell footstool
pillowcase
""".split()

PLACES = """
kitchen pantry cellar attic hallway bedroom parlor balcony porch courtyard driveway garage workshop factory warehouse
market bakery butchery pharmacy clinic hospital school college university library museum theater cinema stadium
gymnasium office bank courthouse prison barracks station airport terminal platform village suburb downtown boulevard
avenue alley crossroad highway roundabout playground park cemetery farm barn shed greenhouse campsite cottage cabin
mansion inn tavern bookshop corridor staircase barbershop fairground
""".split()

QUALITIES = """
old young new small large big little tall short long wide narrow heavy light thick thin round square flat sharp dull
bright dark pale clean dirty wet dry warm cool hot cold soft hard smooth rough loud quiet quick slow early late cheap
expensive plain fancy simple clever foolish brave shy proud modest honest clumsy careful careless cheerful gloomy
angry calm nervous patient hungry thirsty sleepy tired busy idle lucky famous strange curious friendly polite rude
generous greedy wooden metal plastic leafy grassy sturdy fragile spare familiar ordinary splendid shabby
""".split()

ACTIONS = """
carried lifted dropped pushed pulled found lost borrowed returned bought sold cleaned washed repaired opened closed
hid watched studied sketched measured counted packed unpacked folded wrapped delivered collected admired ignored
noticed inspected moved turned shook touched kept wanted needed remembered guarded hauled dragged stored sorted traded
rented ordered examined praised described mended trimmed tied loosened emptied filled raised tasted chose
""".split()

DEEDS = """
waited rested slept laughed cried smiled sang danced walked ran stopped paused listened worked played stood sat knelt
lingered arrived departed hurried traveled argued
""".split()

MANNERS = """
quietly slowly quickly gently carefully eagerly happily sadly calmly proudly politely boldly bravely kindly softly
loudly suddenly gladly patiently warmly briefly often rarely always neatly firmly lazily hastily secretly
""".split()

TIMES = "morning afternoon evening night winter summer autumn weekend holiday festival".split()
JOINTS = "while before after because when until although whenever".split()
RELATIONS = "near behind beyond under above beside across inside outside along around past through over below".split()

# Classes of filler words: a changed word stays within its class, so that a sentence remains a sentence.
FILLERS = {
    "the": ["the"],
    "this": ["this"],
    "every": ["every"],
    "and": ["and"],
    "PERSON": PEOPLE,
    "THING": THINGS,
    "PLACE": PLACES,
    "QUALITY": QUALITIES,
    "ACTION": ACTIONS,
    "DEED": DEEDS,
    "MANNER": MANNERS,
    "TIME": TIMES,
    "JOINT": JOINTS,
    "RELATION": RELATIONS,
}
# Fifteen words each; the full stop is the sixteenth token.
PATTERNS = (
    "the QUALITY PERSON MANNER ACTION the QUALITY THING RELATION the PLACE JOINT the PERSON DEED",
    "this QUALITY THING RELATION the QUALITY PLACE DEED MANNER JOINT the PERSON ACTION the THING",
    "JOINT the PERSON ACTION the THING the QUALITY PERSON MANNER DEED RELATION the QUALITY PLACE",
    "the PERSON and the PERSON MANNER ACTION the QUALITY THING RELATION the QUALITY QUALITY PLACE",
    "every TIME the PERSON ACTION this QUALITY THING and DEED MANNER RELATION the QUALITY PLACE",
)

WORDS = (*SPECIAL_TOKENS, *SIGNS, *KEY_FIRST, *KEY_SECOND, *VALUES, *(word for c in FILLERS.values() for word in c))
WORD_TO_ID = {word: index for index, word in enumerate(WORDS)}
PAD, BOS, EOS, UNK = range(4)
NOTE, LINK, ASK, COLON, EQUALS, ARROW, STOP, PERIOD = range(4, 12)
FIRST_AT, SECOND_AT, VALUES_AT = (WORD_TO_ID[words[0]] for words in (KEY_FIRST, KEY_SECOND, VALUES))

SENTENCE = 16  # tokens of a haystack sentence, and the room of any other segment
SENTENCES = 512
CHANGED = 0.1
VALUE_WORDS = 4
NOTE_LENGTH, LINK_LENGTH = 10, 8  # "note : k k = v v v v ;" and "link : k k -> k k ;"
ASK_LENGTH, ASK_ALIAS_LENGTH = 10, 13
FIRST_HALVES, SECOND_HALVES = 6, 14  # a text's keys are pairs of so few words that most share a half
TEXT_WEIGHT = 0.05
_TOKEN = r"->|\w+|[^\w\s]"


def encode(text: str) -> list[int]:
    """Token ids of ``text`` without ``<bos>``; the same ids as the tokenizer of :func:`build_tokenizer`."""
    return [WORD_TO_ID.get(token, UNK) for token in re.findall(_TOKEN, text.lower())]


def decode(ids: Iterable[int] | torch.Tensor) -> str:
    """Readable text of token ids, special tokens left out."""
    numbers = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    return " ".join(WORDS[i] for i in numbers if i >= len(SPECIAL_TOKENS))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer: words split at white space, signs are tokens of their own, ``<bos>`` comes first.

    Capitals are read as small letters; an unknown word becomes ``<unk>``.
    """
    tokenizer = Tokenizer(models.WordLevel(dict(WORD_TO_ID), unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), behavior="removed", invert=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


class Haystack:
    """The fixed set of ``SENTENCES`` plain sentences; a text draws from it and changes one word in ten.

    ``seed`` fixes the sentences (training and evaluation use the same set); the draws have their own generator.
    """

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        rng = random.Random(seed)
        patterns = [rng.choice(PATTERNS).split() for _ in range(SENTENCES)]
        rows = [[WORD_TO_ID[rng.choice(FILLERS[name])] for name in pattern] + [PERIOD] for pattern in patterns]
        self.sentences = torch.tensor(rows, device=device)  # [SENTENCES, SENTENCE]
        # Where the class of each word starts and how many words it has; anything but a filler is its own class.
        start, size = torch.arange(len(WORDS)), torch.ones(len(WORDS))
        for words in FILLERS.values():
            first = WORD_TO_ID[words[0]]
            start[first : first + len(words)] = first
            size[first : first + len(words)] = len(words)
        self._class_start, self._class_size = start.to(device), size.to(device)

    def draw(self, *shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Random sentences, int64 ``[*shape, SENTENCE]``, each word changed with probability ``CHANGED``."""
        device = self.sentences.device
        ids = self.sentences[torch.randint(SENTENCES, shape, generator=generator, device=device)]
        # One draw serves both questions: below CHANGED it changes the word, and its place below CHANGED says to which.
        draw = torch.rand(ids.shape, generator=generator, device=device) / CHANGED
        size = self._class_size[ids]
        other = self._class_start[ids] + (draw * size).long().clamp(max=size.long() - 1)
        return torch.where(draw < 1, other, ids)


_haystacks: dict[str, Haystack] = {}


def haystack(device: torch.device | str = "cpu") -> Haystack:
    """The common haystack on ``device``, made once."""
    name = str(torch.device(device))
    if name not in _haystacks:
        _haystacks[name] = Haystack(device=device)
    return _haystacks[name]


@dataclass(frozen=True)
class Example:
    """One question. ``prompt_ids`` int64 ``[P]`` begin with ``<bos>``, ``answer_ids`` int64 ``[A]`` end with ``;``.

    ``needle_at`` is the place in ``prompt_ids`` of the ``note`` that holds the answer, ``link_at`` that of the alias.
    """

    task: str
    prompt_ids: torch.Tensor
    answer_ids: torch.Tensor
    needle_at: int
    link_at: int | None

    @property
    def prompt(self) -> str:
        """The text to be read, which ends with the open question; the tokenizer puts ``<bos>`` before it."""
        return decode(self.prompt_ids)

    @property
    def answer(self) -> str:
        """The words that should follow, up to and with ``;``."""
        return decode(self.answer_ids)


def _counts(task: str) -> tuple[int, int]:
    """Notes and links of a task's text."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    return {"needle": (1, 0), "lookalike": (16, 0), "alias": (16, 6)}[task]


def minimum_length(task: str) -> int:
    """The fewest tokens that hold the task's facts, its question and the answer."""
    notes, links = _counts(task)
    return 1 + notes * NOTE_LENGTH + links * LINK_LENGTH + (ASK_ALIAS_LENGTH if links else ASK_LENGTH)


def _key_halves(batch: int, generator: torch.Generator | None, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """The few first and second halves of each text's keys, ids ``[B, FIRST_HALVES]`` and ``[B, SECOND_HALVES]``."""
    first = torch.rand(batch, len(KEY_FIRST), generator=generator, device=device).argsort(1)[:, :FIRST_HALVES]
    second = torch.rand(batch, len(KEY_SECOND), generator=generator, device=device).argsort(1)[:, :SECOND_HALVES]
    return first + FIRST_AT, second + SECOND_AT


def make_example(length: int, task: str, seed: int, depth: float | None = None) -> Example:
    """A question of exactly ``length`` tokens, ``<bos>`` and the answer included; millions of tokens are fine.

    ``needle``: one fact. ``lookalike``: sixteen facts whose keys share halves; at least one other has the first half
    of the key that is asked for, and one the second half. ``alias``: the same and six links, one of which is asked
    for.
    ``depth`` in [0, 1] puts the fact that answers at that part of the text; by default it lies anywhere.
    Raises ``ValueError`` for an unknown task, a length too short for it, or a depth outside [0, 1].
    """
    notes, links = _counts(task)
    room = length - minimum_length(task)
    if room < 0:
        raise ValueError(f"task {task!r} needs at least {minimum_length(task)} tokens, got {length}")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth must lie between 0 and 1, got {depth}")
    generator = torch.Generator().manual_seed(seed * len(TASKS) + TASKS.index(task))
    whole, part = divmod(room, SENTENCE)
    sentences = haystack().draw(whole + 1, generator=generator)
    filler = sentences.flatten()[SENTENCE - part :]  # the text begins within a sentence, so that any length is met

    first, second = (half[0] for half in _key_halves(1, generator, "cpu"))
    cells = torch.arange(FIRST_HALVES * SECOND_HALVES)  # key = (cell // SECOND_HALVES, cell % SECOND_HALVES)
    # Key 0 is asked for; keys 1 and 2 share its first and its second half.
    twins = torch.tensor([0, 1, SECOND_HALVES])
    others = cells[~torch.isin(cells, twins)]
    cells = torch.cat([twins, others[torch.randperm(len(others), generator=generator)]])
    keys = torch.stack([first[cells // SECOND_HALVES], second[cells % SECOND_HALVES]], 1)
    values = torch.randint(len(VALUES), (notes, VALUE_WORDS), generator=generator) + VALUES_AT
    meant = torch.randint(notes, (links,), generator=generator)
    meant[:1] = 0

    facts = [[NOTE, COLON, *keys[i].tolist(), EQUALS, *values[i].tolist(), STOP] for i in range(notes)]
    for i in range(links):
        facts.append([LINK, COLON, *keys[notes + i].tolist(), ARROW, *keys[meant[i]].tolist(), STOP])
    # A fact stands before sentence number `gap`; facts in the same gap come in random order.
    gaps = torch.randint(whole + 1, (len(facts),), generator=generator)
    if depth is not None:
        gaps[0] = round(depth * whole)
    shuffled = torch.randperm(len(facts), generator=generator)

    pieces, done, at, starts = [torch.tensor([BOS])], 0, 1, [0] * len(facts)
    for i in shuffled[gaps[shuffled].argsort(stable=True)].tolist():
        upto = part + int(gaps[i]) * SENTENCE
        starts[i] = at + upto - done
        pieces += [filler[done:upto], torch.tensor(facts[i])]
        at, done = starts[i] + len(facts[i]), upto
    reply = [*values[0].tolist(), STOP]
    if links:
        reply = [*keys[0].tolist(), EQUALS, *reply]
    asked = keys[notes if links else 0].tolist()
    pieces += [filler[done:], torch.tensor([ASK, COLON, *asked, ARROW if links else EQUALS])]
    return Example(task, torch.cat(pieces), torch.tensor(reply), starts[0], starts[notes] if links else None)


def make_batch(batch: int, length: int, task: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``batch`` examples of consecutive seeds: prompts int64 ``[B, P]`` and answers ``[B, A]``, P + A = ``length``."""
    examples = [make_example(length, task, seed + i) for i in range(batch)]
    return torch.stack([e.prompt_ids for e in examples]), torch.stack([e.answer_ids for e in examples])


def _rows(*parts: int | torch.Tensor) -> torch.Tensor:
    """Segments ``[B, n, SENTENCE]`` from single ids, ``[B, n]`` and ``[B, n, m]`` tensors, padded at the right."""
    like = next(part for part in parts if isinstance(part, torch.Tensor))
    columns = [like.new_full(like.shape[:2], part) if isinstance(part, int) else part for part in parts]
    row = torch.cat([column if column.dim() == 3 else column[..., None] for column in columns], -1)
    return torch.nn.functional.pad(row, (0, SENTENCE - row.shape[-1]), value=PAD)


def train_batch(
    batch: int, length: int, device: torch.device | str, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random texts with many answered questions: ``(ids, labels, weights)``, all ``[batch, length]`` on ``device``.

    ``labels`` (int64) are the next tokens. ``weights`` (float32): 1 where the label is a key or value word of an
    answer, 0 where it belongs to a fact or to a question and so cannot be known, ``TEXT_WEIGHT`` elsewhere. A question
    comes after the facts that answer it. ``generator`` must live on ``device``. Raises ``ValueError`` below 64 tokens.
    """
    if length < 64:
        raise ValueError(f"a training text needs at least 64 tokens, got {length}")
    blocks = length // SENTENCE
    notes, links, asks = min(24, blocks // 4), min(8, max(1, blocks // 6)), min(28, blocks // 2)
    special = notes + links + asks
    # Enough segments to fill the text even if all the special ones are as short as a link and the first one is cut.
    segments = 1 + -(-(length + special * (SENTENCE - LINK_LENGTH)) // SENTENCE)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    # What stands where: segment 0 is a sentence, the last one is a dump for facts and questions that are not wanted.
    place = 1 + rand(batch, segments - 1).argsort(1)
    note_at, link_at, ask_at = place[:, :special].split([notes, links, asks], 1)
    has_note = torch.arange(notes, device=device) < 1 + below(notes, batch, 1)
    has_link = torch.arange(links, device=device) < below(links + 1, batch, 1)

    first, second = _key_halves(batch, generator, device)
    cells = rand(batch, FIRST_HALVES * SECOND_HALVES).argsort(1)[:, : notes + links]
    first, second = first.gather(1, cells // SECOND_HALVES), second.gather(1, cells % SECOND_HALVES)
    keys = torch.stack([first, second], -1)  # [B, notes + links, 2]
    values = below(len(VALUES), batch, notes, VALUE_WORDS) + VALUES_AT
    meant = (rand(batch, links, notes) + has_note[:, None]).argmax(-1)  # a random present note

    def pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table.gather(1, index[..., None].expand(-1, -1, table.shape[-1]))

    note_ready = has_note[:, None] & (note_at[:, None] < ask_at[..., None])  # [B, asks, notes]
    known_at = torch.maximum(link_at, note_at.gather(1, meant))  # an alias needs both of its facts
    link_ready = has_link[:, None] & (known_at[:, None] < ask_at[..., None])  # [B, asks, links]
    by_link = link_ready.any(-1) & (rand(batch, asks) < 0.5)
    link_asked = (rand(batch, asks, links) + link_ready).argmax(-1)
    note_asked = (rand(batch, asks, notes) + note_ready).argmax(-1)
    note_asked = torch.where(by_link, meant.gather(1, link_asked), note_asked)
    has_ask = by_link | note_ready.any(-1)
    asked, answer = pick(keys, note_asked), pick(values, note_asked)
    direct = _rows(ASK, COLON, asked, EQUALS, answer, STOP)
    alias = _rows(ASK, COLON, pick(keys, link_asked + notes), ARROW, asked, EQUALS, answer, STOP)

    ids = haystack(device).draw(batch, segments + 1, generator=generator)
    weights = torch.full(ids.shape, TEXT_WEIGHT, device=device)
    lengths = torch.full((batch, segments + 1), SENTENCE, device=device)
    t = TEXT_WEIGHT
    direct_weight = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, t] + [0] * 6, device=device)
    alias_weight = torch.tensor([0, 0, 0, 0, 0, 1, 1, t, 1, 1, 1, 1, t] + [0] * 3, device=device)
    zeros = torch.zeros(1, 1, SENTENCE, device=device)
    for at, present, row, weight, size in (
        (note_at, has_note, _rows(NOTE, COLON, keys[:, :notes], EQUALS, values, STOP), zeros, NOTE_LENGTH),
        (link_at, has_link, _rows(LINK, COLON, keys[:, notes:], ARROW, pick(keys, meant), STOP), zeros, LINK_LENGTH),
        (ask_at, has_ask & ~by_link, direct, direct_weight, ASK_LENGTH),
        (ask_at, by_link, alias, alias_weight, ASK_ALIAS_LENGTH),
    ):
        at = torch.where(present, at, segments)
        index = at[..., None].expand(-1, -1, SENTENCE)
        ids.scatter_(1, index, row)
        weights.scatter_(1, index, weight.expand(row.shape))
        lengths.scatter_(1, at, size)

    # Pack the segments one after another; places 0 .. length are kept, and place length + 1 takes what falls outside.
    lengths = lengths[:, :segments]
    cut = below(SENTENCE, batch, 1)
    inside = torch.arange(SENTENCE, device=device)
    to = (1 - cut + lengths.cumsum(1) - lengths)[..., None] + inside
    to = torch.where((inside < lengths[..., None]) & (to >= 1) & (to <= length), to, length + 1).flatten(1)
    text = torch.full((batch, length + 2), BOS, device=device).scatter_(1, to, ids[:, :segments].flatten(1))
    weight = torch.zeros(batch, length + 2, device=device).scatter_(1, to, weights[:, :segments].flatten(1))
    return text[:, :length], text[:, 1 : length + 1], weight[:, 1 : length + 1]
