"The trace generator that the package ships: what it is, and that it still does what its card says."
import random
from functools import lru_cache
import pytest
from cmtrag.curriculum import held_out, memory_lines
from cmtrag.generator import load_generator
from cmtrag.pipeline import Session
from cmtrag.profiles import generator_folder, generators, load_profile, make_trace_generator
from cmtrag.traces import remap_refs
from cmtrag.sft import previous_plans, score_drafts, score_plans

@lru_cache
def gen(): return load_generator(generator_folder(load_profile('small')))

@lru_cache
def scores(kind, n, reset=False): return score_plans(gen(), held_out('dev').after[kind][:n], reset=reset)

def test_it_ships_whole_and_small():
    assert 'small' in generators()
    folder = generator_folder(load_profile('small'))
    assert {p.name for p in folder.iterdir()}=={'README.md', 'config.json', 'generator.json', 'model.safetensors', 'slot_tokenizer.json'}
    assert sum(p.stat().st_size for p in folder.iterdir())<20e6
    card = (folder/'README.md').read_text(encoding='utf-8')
    assert 'papermill nbs/43_sft.ipynb' in card and 'seed' in card

def test_its_words_are_no_names():
    told = {w for d in held_out('dev').after['single'] for t in d.traces for w in t.answer.split() if w[:1].isupper()}
    capital = {w for w in gen().scribe.tok.words if w[:1].isupper()}
    assert len(capital)<40 and len(capital & told)<5

@pytest.mark.parametrize('kind, n, floor', [('single', 100, .95), ('short', 40, .83), ('long', 20, .80)])
def test_it_plans_unseen_worlds(kind, n, floor):
    s = scores(kind, n)
    assert s['plan']>=floor and s['invalid']==0 and s['within']['f1']>=.95, s['plan']

def test_it_needs_its_state():
    own,reset = scores('long', 20),scores('long', 20, True)
    ds = held_out('dev').after['long'][:20]
    last = score_drafts(ds, previous_plans(ds))
    assert own['plan_linked']>=reset['plan_linked']+.25
    assert own['across']['f1']>=last['across']['f1']+.5 and own['by_distance']['6–10']['recall']>=.6

def test_a_follow_up_finds_its_trace():
    g = make_trace_generator(load_profile('small'))
    ds,s = g.generate(g.start(), 'Where was Ludmir Varagast born?', 1)
    assert [d.sub_question for d in ds]==['Where was Ludmir Varagast born?']
    ds,s = g.generate(s, 'Who wrote The Amber Kettle?', 2)
    assert [d.sub_question for d in ds]==['Who is the author of The Amber Kettle?']
    ds,s = g.generate(s, 'Who is the mayor of that city?', 3)
    assert ds[0].deps==(1,) and '[A_1]' in ds[0].sub_question

def test_an_unrelated_question_is_not_taken_for_a_follow_up():
    pairs,right,rng = 60,0,random.Random(0)
    for _ in range(pairs):
        a,b = (d.turns[0] for d in rng.sample(held_out('dev').after['single'], 2))
        ds,s = gen().generate(gen().start(), a.query, 1)
        n = len(ds)
        right += [d.sub_question for d in gen().generate(s, b.query, n+1)[0]]==[remap_refs(t.draft.sub_question, {k: k+n for k in range(1, 9)}) for t in b.traces]
    assert right>=.85*pairs, right                        # 54 when it was published; one that it gets wrong: "Who founded Korbel Records?" after another name

def test_what_it_cannot_read_is_passed_on():
    g = make_trace_generator(load_profile('small'))
    ds,s = g.generate(g.start(), 'Wieso, weshalb, warum?', 1)
    assert ds[0].sub_question=='Wieso, weshalb, warum?' and s.count==1

def test_plans_are_scored_by_a_run(tmp_path, monkeypatch):
    import json, papermill
    from pathlib import Path
    from cmtrag.runs import project_root
    nb,out = project_root()/'nbs'/'46_plans.ipynb',tmp_path/'out.ipynb'
    with pytest.raises(papermill.PapermillExecutionError, match='single, short, long, ultra'): papermill.execute_notebook(nb, out, dict(kinds='sinlge'), cwd=nb.parent, progress_bar=False)
    got = papermill.execute_notebook(nb, out, dict(kinds='single,short', wordings='unseen', limit=3), cwd=nb.parent, progress_bar=False)
    said = ''.join(o.get('text', '') for c in got.cells for o in c.get('outputs', ()))
    scores = json.loads((project_root()/said.split('folder: ')[1].split()[0]/'metrics.json').read_text(encoding='utf-8'))
    assert {k.split('wordings')[1] for k in scores if 'short' in k}=={'', ': words as they are', ': reset', ': id−1'} and all(s['turns']>=3 for s in scores.values())
