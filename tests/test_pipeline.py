"A result does not depend on what else is under way: one dialogue at a time and 16 at once give the same turns."
import hashlib

import pytest

from cmtrag.experiment import eval_source
from cmtrag.drafts import GoldGenerator
from cmtrag.llm import ScriptedLLM
from cmtrag.mumuqa import assemble
from cmtrag.pipeline import CMTSystem, hold_all
from cmtrag.profiles import load_profile, make_reader
from cmtrag.reader import Reader
from cmtrag.retrieval import Index, MiniLM, Retriever

def outcome(turns): return [(t.answer, t.nodes, t.context, t.reused, t.looked_up, t.calls, t.replies) for t in turns]

def scripted(prompt):
    "An answer that any change of the prompt would change."
    text = prompt if isinstance(prompt, str) else '\n'.join(m['content'] for m in prompt)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

@pytest.fixture(scope='module')
def world():
    data = assemble(eval_source('world', 'dev', size='tiny'), split='dev', n_short=44, n_long=6, fewest=(14,20))
    return data,Index.build(data.corpus, MiniLM())

def run(world, reader, n, workers):
    data,index = world
    system = CMTSystem('oracle', GoldGenerator, Retriever(index, data.corpus), reader)  # a new retriever: nothing cached
    return [outcome(ts) for ts in hold_all(system, data.dialogues[:n], workers=workers)]

def test_one_at_a_time_and_sixteen_at_once(world):
    reader = Reader(ScriptedLLM(scripted), prompt='chat')
    n = 40
    assert len(world[0].dialogues)>=n
    one,many = run(world, reader, n, 1),run(world, reader, n, 16)
    assert one==many
    assert any(t[4]!=(None,)*len(t[4]) for ts in one for t in ts), 'no keyword lookup fired'

def test_the_same_with_the_small_reader(world):
    reader = make_reader(load_profile('small'), cache=False)
    assert run(world, reader, 3, 1)==run(world, reader, 3, 16)

@pytest.mark.soak
@pytest.mark.parametrize('name', ['small', 'smol'])
def test_the_same_with_real_readers(world, name):
    reader = make_reader(load_profile('small'), name, cache=False)
    assert run(world, reader, 6, 1)==run(world, reader, 6, 16)
