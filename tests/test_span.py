"The small reader: nothing but an answer comes out, order and company mean nothing, and it reads real rows as well as its card says."
import json, os, random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st


from cmtrag.profiles import load_profile, make_llm, make_reader
from cmtrag.reader import ReaderError
from cmtrag.retrieval import Index, MiniLM, Retriever
from cmtrag.sources import make_paragraph, read_source
from cmtrag.span import (SpanError, SpanReader, balanced_accuracy, comparison_questions, load_span, measure, measure_examples, measure_yes_no, row_text,
                         shipped_folder)
from cmtrag.world import world_source

@pytest.fixture(scope='module')
def reader(): return SpanReader()

text = st.text(st.characters(codec='utf-8'), max_size=300)

@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(question=text, paragraphs=st.lists(st.tuples(text, text, st.floats(-1, 1)), max_size=3), seed=st.integers(0, 99))
def test_any_text(reader, question, paragraphs, seed):
    ps = [(make_paragraph(t, x), s) for t,x,s in paragraphs]
    if not question.strip():
        with pytest.raises(ReaderError): reader.answer(question, ps)
        return
    r = reader.answer(question, ps)
    assert r.answer in ('', 'yes', 'no') or any(r.answer in row_text(p.title, p.text) for p,_ in ps)
    random.Random(seed).shuffle(ps)
    again = reader.answer(question, ps)
    assert (again.answer, again.reply.raw)==(r.answer, r.reply.raw)
    if 'start' in r.reply.raw:  # the place it names is the place of the answer
        p = next(p for p,_ in ps if p.id==r.reply.raw['paragraph'])
        assert row_text(p.title, p.text)[r.reply.raw['start']:r.reply.raw['end']]==r.answer

@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(query=text, steps=st.lists(st.tuples(text, text), min_size=1, max_size=4))
def test_any_steps(reader, query, steps):
    if not query.strip():
        with pytest.raises(ReaderError): reader.aggregate(query, steps)
    else: assert reader.aggregate(query, steps).answer in {'yes', 'no', *(a for _,a in steps)}

def test_long_texts_are_read_to_their_end(reader):
    long = lambda n: make_paragraph('Kestrel Television', 'The weather was fine that day. '*n+'Kestrel Television was founded by Ida Marr.')
    assert reader.answer('Who founded Kestrel Television?', [(long(50), .5)]).answer=='Ida Marr'
    assert SpanReader(none=1.).answer('Who founded Kestrel Television?', [(long(300), .5)]).answer=='Ida Marr'

def test_yes_or_no_on_unseen_wordings(reader):
    src = world_source('dev', size='tiny')
    retriever = Retriever(Index.build(src.corpus, MiniLM()), src.corpus)
    got = measure_yes_no(reader, comparison_questions('dev', 0, 'tiny', 60), retriever)
    assert balanced_accuracy(got.gold, got['read']) >= .8 and balanced_accuracy(got.gold, got.steps) >= .8

def test_it_is_the_small_profiles_reader():
    r = make_reader(load_profile('small'))
    assert isinstance(r, SpanReader) and r.config['revision'] and not r.config.get('prompt')
    assert sum(f.stat().st_size for f in shipped_folder().iterdir()) < 5e6
    with pytest.raises(ValueError, match='smol'): make_llm('span')

def test_broken_weights_are_named(tmp_path):
    for f in shipped_folder().iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    good = (tmp_path/'config.json').read_text()
    for change,says in ((dict(base_revision='x'), 'revision'), (dict(rank=3), 'span.safetensors|shape|other weights')):
        (tmp_path/'config.json').write_text(json.dumps(json.loads(good) | change))
        with pytest.raises(SpanError, match=says): load_span(tmp_path)
    (tmp_path/'config.json').write_text('{')
    with pytest.raises(SpanError, match='damaged'): load_span(tmp_path)
    (tmp_path/'config.json').write_text(good)
    (tmp_path/'span.safetensors').unlink()
    with pytest.raises(SpanError, match='42_span'): load_span(tmp_path)

@pytest.mark.skipif('CMTRAG_DATA' not in os.environ, reason='CMTRAG_DATA is not set')
def test_real_hops(reader):
    src = read_source(Path(os.environ['CMTRAG_DATA'])/'musique'/'musique_ans_dev_200.jsonl')
    hops = [e for e in measure_examples(src, _no_scores(src), n=60)]
    got = measure(SpanReader(none=1.), hops, sizes=(0, 4)).groupby('distractors').em.mean()
    assert got[0] >= .35 and got[4] >= .3, got

class _no_scores:
    "A retriever without an opinion."
    def __init__(self, src): self.corpus = src.corpus
    def score(self, question, pids): return [0.]*len(pids)
