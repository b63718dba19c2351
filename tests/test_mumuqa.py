"The benchmark as files: every invariant broken by hand is refused with its place; graphs of dialogues resolve to their sources; both sides stay apart."
import json, os, random, shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
import pytest
from cmtrag.dataset import DatasetError, audit_dialogues, export, load_mumuqa, read_parquet, shared_evidence
from cmtrag.metrics import normalise_answer
from cmtrag.mumuqa import (References, ambiguity, assemble, build, giveaways, interleave, join_sources, operator_shares, outside, paper_table6, ranges,
                           short_dialogues, single_turns, usable)
from cmtrag.realization import RuleRealizer
from cmtrag.sources import SHAPES, Corpus, Hop, Question, Source, SourceError, make_paragraph, read_source
from cmtrag.synthesis import Realization
from cmtrag.traces import check_dialogue, remap_refs, resolve_refs
from cmtrag.world import world_source

SIZES = {'short train': 12, 'short dev': 8, 'long train': 4, 'long dev': 4}

@pytest.fixture(scope='module')
def sources(): return world_source('train', size='tiny'), world_source('dev', size='tiny')

@pytest.fixture(scope='module')
def mq(sources): return build(*sources, sizes=SIZES)

@pytest.fixture
def folder(mq, tmp_path): return export(mq, tmp_path/'mq', parquet=False)

# --- files

def test_export_and_load(mq, folder):
    back = load_mumuqa(folder)
    assert (back.dialogues, back.counts, back.about)==(mq.dialogues, mq.counts, json.loads(json.dumps(mq.about)))
    assert back.corpus==mq.corpus

def test_the_same_bytes_twice(mq, folder, sources, tmp_path):
    again = export(build(*sources, sizes=SIZES, workers=2), tmp_path/'again', parquet=False)
    for p in sorted(folder.rglob('*')):
        if p.is_file(): assert p.read_bytes()==(again/p.relative_to(folder)).read_bytes(), p.name

def first(row, ok):
    "(turn, trace) of the first trace that `ok`."
    return next((u, t) for u in row['turns'] for t in u['traces'] if ok(t))

def cross(t): return any(e['cross_turn'] for e in t['edges'])
def inner(t): return any(not e['cross_turn'] for e in t['edges'])

def skip_id(r): first(r, lambda t: t['id']==2)[1]['id'] = 3
def repeat_id(r): first(r, lambda t: t['id']==2)[1]['id'] = 1
def forward_dep(r):
    t = first(r, inner)[1]
    t['draft']['deps'][0] = t['edges'][0]['dep'] = t['id']
def lost_dep(r):
    t = first(r, cross)[1]
    t['draft']['deps'],t['edges'] = [],[]
def own_label(r):
    e = first(r, cross)[1]['edges'][0]
    e['cross_turn'] = not e['cross_turn']
def inner_label(r): first(r, inner)[1]['edges'][0]['cross_turn'] = True
def edge_kind(r):
    e = first(r, cross)[1]['edges'][0]
    e['type'] = 'Ref' if e['type']=='Ext' else 'Ext'
def unknown_kind(r): first(r, cross)[1]['edges'][0]['type'] = 'Rel'
def unsaid(r): first(r, cross)[1]['edges'][0]['phrase'] = 'that submarine'
def no_phrase(r): first(r, cross)[1]['edges'][0]['phrase'] = ''
def inner_phrase(r): next(e for u in r['turns'] for t in u['traces'] for e in t['edges'] if not e['cross_turn'])['phrase'] = 'that'
def query(r): first(r, cross)[0]['query'] = 'Who knows?'
def reworded(r): r['turns'][0]['query'] += ' Really?'
def evidence(r): r['turns'][0]['traces'][0]['para_ids'] = ['p0000000000000000']
def no_evidence(r): r['turns'][0]['traces'][0]['para_ids'] = []
def answer(r): r['turns'][0]['answer'] += 'x'
def answer_trace(r): r['turns'][0]['answer_trace'] = 99
def blank_answer(r): r['turns'][0]['traces'][0]['answer'] = ' '
def other_answer(r):
    u = r['turns'][0]
    for o in (u, *(t for t in u['traces'] if t['id']==u['answer_trace'])): o['answer'] += 'x'
def keywords(r): first(r, cross)[1]['keywords_resolved'] = 'something else'
def turn_number(r): r['turns'][1]['turn'] = 1
def trace_turn(r): r['turns'][1]['traces'][0]['turn'] = 1
def wrong_side(r): r['split'] = 'train'
def wrong_kind(r): r['kind'] = 'long'
def identity(r): r['id'] = 'd000000000000'
def operator(r): r['turns'][0]['operator'] = 'XX'
def case(r): r['turns'][0]['case'] = 'odd'
def no_source(r): r['turns'][0]['traces'][0]['source'] = ''
def twice(r): r['turns'][1]['traces'][0].update(source=r['turns'][0]['traces'][0]['source'], hop=r['turns'][0]['traces'][0]['hop'])
def unknown_field(r): r['extra'] = 1
def missing_field(r): del r['turns'][0]['query']
def wrong_type(r): r['turns'][0]['turn'] = '1'
def no_turns(r): r['turns'] = []

BREAKS = [skip_id, repeat_id, forward_dep, lost_dep, own_label, inner_label, edge_kind, unknown_kind, unsaid, no_phrase, inner_phrase, query, reworded, evidence, no_evidence, answer,
          answer_trace, blank_answer, other_answer, keywords, turn_number, trace_turn, wrong_side, wrong_kind, identity, operator, case, no_source, twice, unknown_field,
          missing_field, wrong_type, no_turns]

@pytest.mark.parametrize('change', BREAKS, ids=[f.__name__ for f in BREAKS])
@pytest.mark.parametrize('name', ['short-dev', 'long-dev'])
def test_a_broken_invariant_is_refused_with_its_place(folder, name, change):
    path = folder/'jsonl'/f'{name}.jsonl'
    rows = [json.loads(l) for l in path.read_text(encoding='utf-8').splitlines()]
    old = json.dumps(rows[1])
    change(rows[1])
    if json.dumps(rows[1])==old: rows[1]['kind'] = 'short'   # a long file: the change to `long` is none
    path.write_text(''.join(json.dumps(r)+'\n' for r in rows), encoding='utf-8')
    with pytest.raises(SourceError) as e: load_mumuqa(folder)
    assert (e.value.file, e.value.line)==(str(path), 2)

def edit(path, f):
    path.write_text(f(path.read_text(encoding='utf-8')), encoding='utf-8', newline='\n')

def test_a_dialogue_of_the_other_side_is_refused(folder):
    line = (folder/'jsonl'/'short-train.jsonl').read_text(encoding='utf-8').splitlines()[0]
    edit(folder/'jsonl'/'short-dev.jsonl', lambda s: s+line.replace('"split": "train"', '"split": "dev"')+'\n')
    with pytest.raises(SourceError, match='on both sides|occurs twice') as e: load_mumuqa(folder)
    assert e.value.line==9

def test_a_repeated_line_is_refused(folder):
    edit(folder/'jsonl'/'short-dev.jsonl', lambda s: s+s.splitlines()[0]+'\n')
    with pytest.raises(SourceError, match='occurs twice'): load_mumuqa(folder)

def test_a_lost_session_is_refused(mq, folder):
    used = Counter(u.session for d in mq.splits['long dev'] for u in d.turns)
    at = next(i for i,d in enumerate(mq.splits['short dev']) if used[d.id])
    edit(folder/'jsonl'/'short-dev.jsonl', lambda s: ''.join(l for i,l in enumerate(s.splitlines(True)) if i!=at))
    with pytest.raises((SourceError, DatasetError)): load_mumuqa(folder)

@pytest.mark.parametrize('name,change,says', [
    ('jsonl/long-dev.jsonl', lambda s: s[s.index('\n')+1:], 'the manifest says'),
    ('jsonl/corpus.jsonl', lambda s: s[:s.rindex('\n', 0, -1)+1], 'the manifest says|not in the corpus'),
    ('jsonl/long-dev.jsonl', lambda s: s[:-40], 'not JSON'),
    ('jsonl/long-dev.jsonl', lambda s: s.replace('{"id"', '{ "id"', 1), 'SHA-256'),
    ('README.md', lambda s: s.replace('num_examples: ', 'num_examples: 1', 1), 'the card counts'),
    ('README.md', lambda s: s+'!', 'SHA-256'),
    ('manifest.json', lambda s: s.replace('"schema": ', '"schema": 9'), 'schema'),
    ('manifest.json', lambda s: s[:-9], 'manifest'),
    ('manifest.json', lambda s: s.replace('"short dev"', '"../x dev"'), 'unknown split'),
    ('manifest.json', lambda s: '[]', 'manifest')])
def test_a_damaged_file_is_refused(folder, name, change, says):
    edit(folder/name, change)
    with pytest.raises((SourceError, DatasetError), match=says): load_mumuqa(folder)

def test_a_missing_file_is_named(folder):
    (folder/'README.md').unlink()
    with pytest.raises(DatasetError, match='README.md: is missing'): load_mumuqa(folder)
    shutil.rmtree(folder/'jsonl')
    with pytest.raises(SourceError, match='corpus.jsonl'): load_mumuqa(folder)

def test_parquet_reads_back(mq, tmp_path):
    pytest.importorskip('pyarrow')
    out = export(mq, tmp_path/'mq')
    for k,ds in mq.splits.items(): assert read_parquet(out/'parquet'/f'{k.replace(" ", "-")}.parquet')==ds
    load_mumuqa(out)
    (out/'parquet'/'short-dev.parquet').write_bytes(b'PAR1')
    with pytest.raises(DatasetError, match='short-dev.parquet'): load_mumuqa(out)

# --- graphs

def pool(seed, n=40):
    "Random questions of all six shapes whose answers meet often, with one paragraph a hop."
    r,qs,ps = random.Random(seed),[],[]
    for i in range(n):
        refs,hops = SHAPES[r.choice(list(SHAPES))],[]
        for k,js in enumerate(refs, 1):
            p = make_paragraph(f'T{seed}.{i}.{k}', f'text {r.random()}')
            ps.append(p)
            hops.append(Hop(f'What of Thing {i}.{k} {" and ".join(f"[A_{j}]" for j in js)}?', f'Town {seed}.{r.randrange(n//3)}' if k < len(refs) else f'End {seed}.{i}', (), (p.id,)))
        ids = tuple(h.para_ids[0] for h in hops)
        qs.append(Question(f'{seed}-{i}', f'Question {i}?', hops[-1].answer, (), tuple(hops), ids, ids, '', 'random'))
    return Source(qs, Corpus(ps), {}, 'none', f'pool{seed}')

class Anything:
    "Words every pair somehow."
    counts = {}
    def sub_question(self, hop): return hop.question
    def __call__(self, pair):
        refs = [h for h in pair.nodes if pair.entry in pair.question.hops[h-1].refs] if pair.previous else []
        kind = 'Ref' if refs else 'Ext'
        return Realization(f'Question about {pair.question.id} {pair.nodes}' + (' and that town' if pair.previous else '') + '?', 'that town' if pair.previous else '', kind)

def test_dialogues_resolve_to_their_sources():
    "Thousands of random graphs: gold traces with gold answers give back every source hop, answer and paragraph."
    graphs = 0
    for seed in range(30):
        src = pool(seed)
        byid = {q.id: q for q in src.questions}
        short = short_dialogues(src.questions, Anything(), 24, seed=seed, relocated=.4)
        for d in (*short, *interleave(short, 8, seed), *single_turns(src.questions, Anything())):
            check_dialogue(d)
            graphs += 1
            answers = {t.id: t.answer for t in d.traces}
            where = {t.id: t.turn for t in d.traces}
            assert [t.id for t in d.traces]==list(range(1, len(answers)+1))
            for t in d.traces:
                q,h = byid[t.source],byid[t.source].hops[t.hop-1]
                gold = resolve_refs(h.question, {k: x.answer for k,x in enumerate(q.hops, 1)})
                assert normalise_answer(resolve_refs(t.draft.sub_question, answers))==normalise_answer(gold)
                assert (t.answer, t.para_ids)==(h.answer, h.para_ids) and all(i < t.id for i in t.draft.deps)
                assert all(e.cross_turn==(where[e.dep] < t.turn) for e in t.edges)
            for u in d.turns:
                end = next(t for t in u.traces if t.id==u.answer_trace)
                assert u.answer==end.answer and (u.case=='partial' or end.hop==len(byid[end.source].hops))
    assert graphs > 2000

# --- the build

def test_relocation_is_reached_by_the_parameter(sources):
    share = lambda r: operator_shares(assemble(world_source('dev'), 'dev', n_short=40, n_long=0, relocated=r).dialogues)[1]['share of turns (%)']
    assert share(0)==0 and abs(share(.5)-50) < 8

def test_sides_share_nothing(mq):
    for kind in ('short','long'):
        a,b = mq.splits[f'{kind} train'],mq.splits[f'{kind} dev']
        assert not any(shared_evidence(a, b, mq.corpus).values())
        assert not any(r['on both sides'] for r in audit_dialogues(a, b)[:5])

def test_questions_reveal_nothing_and_phrases_fit():
    src = world_source('dev')
    mq = assemble(src, 'dev', n_short=100, n_long=20)
    assert giveaways(mq.dialogues)==[]
    a = ambiguity(mq.short, References(src.questions))
    assert a['links'] > 100 and a['phrase fits its antecedent'] > .98 and a['phrase fits exactly one recent answer'] > .5

def test_a_source_that_is_too_small_says_so(sources):
    mq = build(*sources, sizes={'short train': 500, 'short dev': 500, 'long train': 3, 'long dev': 3, 'ultra test': 2}, single=False)
    for side in ('train','dev'):
        made = len(mq.splits[f'short {side}'])
        assert 0 < made < 500 and mq.counts[f'{side}: short dialogues missing']==500-made

def test_a_train_and_dev_source_keep_their_split():
    dev = world_source('dev', size='tiny')
    clash = replace(dev.questions[0], id='clash', question='Another wording of it?')
    train = world_source('train', size='tiny')
    mq = build(Source([*train.questions, clash], train.corpus.add(dev.corpus), {}, 'x', 'both'), dev, sizes=SIZES)
    used = {t.source for k,ds in mq.splits.items() if 'train' in k for d in ds for t in d.traces}
    assert 'clash' not in used and mq.about['partition']['dropped']==1 and mq.about['partition']['dev']==len(usable(dev)[0])

def test_joining(sources):
    a,b = sources
    both = join_sources([a, b, a])
    assert len(both.questions)==len(a.questions)+len(b.questions) and both.counts['joined: in an earlier file already']==len(a.questions)
    other = Source([replace(a.questions[0], question='Something else?')], a.corpus, {}, 'x', 'other')
    assert f'other/{a.questions[0].id}' in {q.id for q in join_sources([a, other]).questions}

def test_ranges_of_table6():
    src,dev = pool(1, 400),pool(2, 120)
    paper = paper_table6()
    mq = build(src, dev, sizes={'short train': 60, 'short dev': 20, 'long train': 20, 'long dev': 10, 'ultra test': 4}, realizer=anything, single=False)
    for k,ds in mq.splits.items():
        for d in ds: assert outside(d, ranges(paper[k]))==''

def anything(questions, split, seed): return Anything()

# --- real questions

DATA = os.environ.get('CMTRAG_DATA')
needs_data = pytest.mark.skipif(not DATA, reason='CMTRAG_DATA is not set')

@pytest.fixture(scope='module')
def real():
    src = join_sources([read_source(Path(DATA)/'musique'/f'musique_ans_{n}.jsonl') for n in ('dev_gold_only', 'dev_200')])
    return src,build(src, sizes={'short train': 3104, 'short dev': 362, 'long train': 300, 'long dev': 60, 'ultra test': 20})

@needs_data
def test_half_of_the_real_questions_are_used(real):
    src,mq = real
    used = {t.source for d in mq.short for t in d.traces}
    assert len(used) >= .5*len(src.questions), f'{len(used)} of {len(src.questions)}'

@needs_data
def test_real_sides_share_no_title_and_no_bridge(real):
    _,mq = real
    a,b = ([d for k,ds in mq.splits.items() if ('train' in k)==t for d in ds] for t in (True, False))
    assert not any(shared_evidence(a, b, mq.corpus).values())

@needs_data
def test_real_questions_reveal_nothing(real): assert giveaways(real[1].dialogues)==[]

@needs_data
def test_real_export_loads(real, tmp_path):
    export(real[1], tmp_path/'real', parquet=False)
    assert load_mumuqa(tmp_path/'real').dialogues==real[1].dialogues
