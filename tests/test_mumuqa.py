"The build: graphs of dialogues resolve to their sources, the parameters do what they say, questions reveal nothing."
import json, os, random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
import pytest
from cmtrag.llm import ScriptedLLM
from cmtrag.metrics import normalise_answer
from cmtrag.mumuqa import (MuMuQA, References, ambiguity, assemble, build, continuations, giveaways, interleave, join_sources, merge_order, operator_shares, outside,
                           paper_table6, ranges, repeats, rule_realizer, short_dialogues, single_turns, statistics, table5, table6, usable)
from cmtrag.realization import LLMRealizer, RuleRealizer
from cmtrag.sources import SHAPES, Corpus, Hop, Question, Source, SourceError, make_paragraph, read_source
from cmtrag.synthesis import Realization, SynthesisError, check_phrases
from cmtrag.traces import Dialogue, Edge, GoldTrace, GoldTurn, TraceDraft, check_dialogue, resolve_refs
from cmtrag.world import world_source

SIZES = {'short train': 12, 'short dev': 8, 'long train': 4, 'long dev': 4}

@pytest.fixture(scope='module')
def sources(): return world_source('train', size='tiny'), world_source('dev', size='tiny')

@pytest.fixture(scope='module')
def mq(sources): return build(*sources, sizes=SIZES)

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

# --- figures, against counting by hand

def trace(id, turn, text, answer, edges, at, aliases=()):
    return GoldTrace(id, turn, TraceDraft(text, text, tuple(e.dep for e in edges)), answer, aliases, ('p',), '', edges, at[0], int(at[1]))

def back(i): return Edge(i, True, 'Ext', 'that')
def inner(i): return Edge(i, False, 'Ext', '')

@pytest.fixture
def by_hand():
    "Four turns, six sub-questions, five cross-turn links (of three turns, four sub-questions); the last turn continues its own question."
    t = [trace(1, 1, 'Where is the mill?', 'Orm', (), 'a1'), trace(2, 1, 'Who runs [A_1]?', 'Bo Adler', (inner(1),), 'a2'),
         trace(3, 2, 'Which river joins [A_1] and [A_2]?', 'Cam', (back(1), back(2)), 'b3', ('River Cam',)),
         trace(4, 3, 'Who named [A_3]?', 'Di', (back(3),), 'b4'), trace(5, 3, 'What of [A_4] and [A_1]?', 'Ed', (inner(4), back(1)), 'b5'),
         trace(6, 4, 'Where is [A_5]?', 'Fa', (back(5),), 'b6')]
    turn = lambda n, query, ts, case: GoldTurn(n, query, tuple(ts), ts[-1].id, ts[-1].answer, ts[-1].aliases, 'GS', case)
    d = Dialogue('d1', (turn(1, 'Who runs the mill?', t[:2], 'original'), turn(2, 'And that?', t[2:3], 'follow-up'), turn(3, 'What of that?', t[3:5], 'follow-up'),
                        turn(4, 'Where is that?', t[5:], 'follow-up')), 'dev', 'short', '')
    ids = {x.id: x.answer for x in t}
    turns = tuple(replace(u, traces=tuple(replace(x, keywords_resolved=resolve_refs(x.draft.keywords, ids)) for x in u.traces)) for u in d.turns)
    return check_phrases(check_dialogue(replace(d, turns=turns)))

def test_table6_counts_every_link(by_hand):
    two = replace(by_hand, turns=by_hand.turns[:2])
    s = statistics([by_hand, two])
    assert s == {'Dialogues': 2, 'Turns min': 2, 'Turns max': 4, 'Turns mean': 3, 'Sub-questions min': 3, 'Sub-questions max': 6, 'Sub-questions mean': 4.5,
                 'Cross-turn edges min': 2, 'Cross-turn edges max': 5, 'Cross-turn edges mean': 3.5}
    assert '| short dev | 2 | 2–4 | 3.00 | 3–6 | 4.50 | 2–5 | 3.50 |' in table6([by_hand, two]).split('\n')
    assert outside(by_hand, {'Cross-turn edges': (1, 4)}) == 'Cross-turn edges 5, allowed 1 to 4' and not outside(by_hand, {'Cross-turn edges': (5, 5)})

def test_table5_counts_turns(by_hand):
    none = {('GS','partial'): 0, ('SQR','carrier'): 0, ('SQR','relocated'): 0, ('SQR','unchanged'): 0}
    assert table5([by_hand]) == {('GS','original'): 1, ('GS','follow-up'): 3} | none and table5([by_hand]*2)['GS','follow-up'] == 6

def test_turns_that_continue_their_own_question_are_counted_apart(by_hand):
    row = lambda *ds: list(continuations(ds)[0].values())[1:]
    assert row(by_hand) == [3, 1, 1, 0]          # of three turns that refer back the last does so to its own question; two questions meet
    apart = replace(by_hand, turns=tuple(replace(u, traces=tuple(replace(t, source='b') for t in u.traces)) for u in by_hand.turns))
    assert row(by_hand, apart) == [6, 4, 2, 1]
    gs,sqr = operator_shares([by_hand])
    assert (gs['turns'], gs['share of turns (%)'], round(gs['refer back to their own question (%)'])) == (4, 100, 33) and sqr['turns'] == 0

def test_repeats_are_counted(by_hand):
    assert set(repeats([by_hand]).values()) == {0}
    u = replace(by_hand.turns[0], turn=5, query='who runs THE mill')
    r = repeats([by_hand, replace(by_hand, turns=(*by_hand.turns, u))])
    assert r == {'dialogues that repeat a question': .5, 'dialogues that repeat a sub-question': .5, 'sub-questions asked before': 2/14, 'answers known before': 2/14}

@pytest.mark.parametrize('turn,query', [(0, 'Is it Bo Adler who runs the mill?'), (0, "Is Orm's mill run by somebody?"), (1, 'And that, near Orm?'), (1, 'And that of Bo Adler?'),
                                        (1, 'Does the River Cam join that?'), (2, 'What of that, given Cam?'), (2, 'What of that, if Di knows?')])
def test_a_question_that_says_an_answer_is_found(by_hand, turn, query):
    assert giveaways([by_hand]) == []
    said = replace(by_hand, turns=tuple(replace(u, query=query) if i==turn else u for i,u in enumerate(by_hand.turns)))
    assert len(found := giveaways([said, by_hand])) == 1 and f'd1 turn {turn+1}' in found[0]

@pytest.mark.parametrize('window', [1, 2, 3, 5])
def test_only_so_many_sessions_are_open(window):
    most = 0
    for seed in range(30):
        left,opened = {s: n for s,n in enumerate([3,4,5,3,6,4])},set()
        for s,_ in merge_order(list(left.values()), random.Random(seed), window):
            opened.add(s)
            most = max(most, len(opened))
            left[s] -= 1
            if not left[s]: opened.remove(s)
        assert not any(left.values())
    assert most == window

def test_no_window_below_one(mq):
    for f in (lambda: merge_order([2,2], random.Random(0), 0), lambda: interleave(mq.short, 2, window=0), lambda: interleave([], 2, window=-1),
              lambda: build(world_source('dev', size='tiny'), window=0)):
        with pytest.raises(SynthesisError, match='window='): f()

def test_sessions_that_ask_the_same_make_no_dialogue(mq):
    "Two sessions on one topic, of different questions: together they would ask one thing twice, in the same words."
    rename = lambda d, n: replace(d, id=f'd{n}', turns=tuple(replace(u, traces=tuple(replace(t, source=f'{n} {t.source}') for t in u.traces)) for u in d.turns))
    d = mq.short[0]
    a,b = rename(d, 1),rename(d, 2)
    c = Counter()
    assert interleave([a, b], 1, counts=c, fewest=(2,2)) == [] and c['long: partners that repeat a question'] > 0
    new = replace(b, turns=tuple(replace(u, query=f'Tell me: {u.query}') for u in b.turns))
    assert len(interleave([a, new], 1, sizes={2: 1}, fewest=(2,2))) == 1
    one = replace(new, turns=(*new.turns[:-1], replace(new.turns[-1], query=a.turns[0].query.upper())))   # a single question is enough
    assert interleave([a, one], 1, sizes={2: 1}, fewest=(2,2)) == []

# --- the build

def test_relocation_is_reached_by_the_parameter(sources):
    share = lambda r: operator_shares(assemble(world_source('dev'), 'dev', n_short=40, n_long=0, relocated=r).dialogues)[1]['share of turns (%)']
    assert share(0)==0 and abs(share(.5)-50) < 8

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

def bare(s, name='bare'):
    return Source([replace(q, hops=tuple(replace(h, para_ids=()) for h in q.hops), gold_ids=()) for q in s.questions], Corpus([]), {}, '', name)

def test_joining_keeps_the_form_with_paragraphs(sources):
    full = sources[0]
    for both in ([full, bare(full)], [bare(full), full], [bare(full), full, bare(full)]):
        joined = join_sources(both)
        assert joined.questions == full.questions and len(joined.corpus) == len(full.corpus)
        assert usable(joined)[0] == usable(full)[0]

def test_joining_renames_once(sources):
    a = sources[0]
    other = Source([replace(a.questions[0], question='Something else?')], a.corpus, {}, 'x', 'other')
    again = join_sources([a, other, other])
    assert len(again.questions) == len(a.questions)+1 and again.counts['joined: in an earlier file already'] == 1
    third = Source([replace(a.questions[0], question='A third thing?')], a.corpus, {}, 'x', 'other')
    with pytest.raises(SynthesisError, match='two questions of other'): join_sources([a, other, third])

def test_near_duplicates_are_left_out():
    "A text of thirteen words and the same with one more, another decomposition, equal answers: alike by the audit's threshold."
    q = pool(1).questions[0]
    long = replace(q, question='Which of the many towns on the long river is the one he left?')
    near = replace(q, id='near', question='Which of the many towns on the long river is the one he left first?', hops=tuple(replace(h, question=f'Say: {h.question}') for h in q.hops))
    src = Source([long, near], pool(1).corpus, {}, '', 'x')
    assert [usable(src, **k)[1]['left out: near-duplicates'] for k in ({}, dict(threshold=.99), dict(threshold=None))] == [1, 0, 0]

def test_an_empty_side_ends_in_an_error(sources):
    a,b = sources
    hopless = Source([replace(q, hops=()) for q in b.questions], b.corpus, {}, '', 'hopless')
    none = Source([], Corpus([]), {}, '', 'none')
    same = Source([replace(q, id=f'x{q.id}', question=f'Well, {q.question}') for q in b.questions], b.corpus, {}, '', 'same')
    for train,dev,says in ((a, bare(b), f'bare: no question can be used .questions: {len(b.questions)}; left out: a hop has no paragraph: {len(b.questions)}'),
                           (a, hopless, "hopless: no question can be used.*hops don't lead to the answer"), (hopless, None, 'hopless: no question'), (none, None, 'none: .*questions: 0'),
                           (bare(a), b, 'bare: no question'), (same, b, f'same: .*shares a title or a bridge entity with {b.name}.*questions: {len(b.questions)}'), (b, b, f'{b.name}: .*twice.*in {b.name}'),
                           (Source(usable(a)[0][:1], a.corpus, {}, '', 'lonely'), None, 'lonely: .*at least two')):
        with pytest.raises(SynthesisError, match=says): build(train, dev, sizes=SIZES)
    with pytest.raises(SynthesisError, match='bare: no question'): assemble(bare(b))

@pytest.mark.parametrize('kw,says', [(dict(sizes={'shrt train': 3}), 'shrt train.*allowed are short train'), (dict(sizes={'short train': 5}), "'short dev'.* is missing"),
    (dict(sizes={'long train': 5}), "'short train'.* is missing"), (dict(sizes={**SIZES, 'short dev': -2}), '=-2'), (dict(sizes={**SIZES, 'short dev': 2.5}), '=2.5'),
    (dict(scale=0), 'scale=0'), (dict(scale=-1), 'scale=-1'), (dict(relocated=1.5), 'relocated=1.5')])
def test_parameters_that_cannot_be_meant(sources, kw, says):
    with pytest.raises(SynthesisError, match=says): build(*sources, **kw)

def named(questions, split, seed, name='rules', part='x'): return rule_realizer(questions, split, seed)

class Maker:
    def __call__(self, questions, split, seed): return rule_realizer(questions, split, seed)

def test_a_realizer_is_named_without_an_address(sources, mq):
    for r,name in ((partial(named, name='llm:x'), 'llm:x'), (partial(named, part='y'), 'named'), (named, 'named'), (Maker(), 'Maker')):
        again = build(*sources, sizes=SIZES, realizer=r, workers=2 if r is named else 1)
        assert again.about['parameters']['realizer'] == name and again.dialogues == mq.dialogues
        assert {**again.about, 'parameters': {**again.about['parameters'], 'realizer': 'rule_realizer'}} == mq.about

def deaf(questions, split, seed):
    "A model that never replies in the form asked for, and rules that step in."
    return LLMRealizer(ScriptedLLM(lambda prompt: 'Sorry?', name=f'deaf {split}'), questions, RuleRealizer(questions, split, seed=seed), split, seed)

def test_what_a_model_did_reaches_the_report(sources):
    one,two = (build(*sources, sizes=SIZES, realizer=deaf, workers=n) for n in (1, 2))
    assert (one.counts, one.about, one.dialogues) == (two.counts, two.about, two.dialogues)
    for side in ('train','dev'):
        total = lambda what: sum(v for k,v in one.counts.items() if k.startswith(f'{side}: {what}: '))
        assert one.counts[f'{side}: worded: by the fallback'] > 0 and total('replies rejected') >= one.counts[f'{side}: worded: by the fallback']
        assert one.about['realizer'][side]['model'] == f'deaf {side}' and one.about['realizer'][side]['fallback'] == 'RuleRealizer'
        assert total('refused') == one.counts[f'{side}: pairs refused']+one.counts.get(f'{side}: relocation: pairs refused', 0)+one.counts[f'{side}: single turns refused']
    json.dumps(one.about)
    small = assemble(sources[1], 'dev', n_short=5, n_long=0, realizer=deaf(sources[1].questions, 'dev', 0))
    assert small.about['realizer']['model'] == 'deaf dev' and small.counts['worded: by the fallback'] > 0

def test_a_folder_that_is_none_is_named(mq, tmp_path):
    f = mq.save(tmp_path/'m')
    assert MuMuQA.load(f).counts == mq.counts
    for text in ('{', '[]', '{}', '{"name": 1, "counts": {}, "about": {}}', '{"name": "", "counts": [], "about": {}}', '{"name": "", "counts": {}, "about": 1}', '['*100000):
        (f/'counts.json').write_text(text)
        with pytest.raises(SourceError, match='counts.json'): MuMuQA.load(f)
    (f/'counts.json').write_bytes(b'\xff\xfe')
    with pytest.raises(SourceError, match='counts.json'): MuMuQA.load(f)
    (f/'counts.json').unlink()
    with pytest.raises(SourceError, match='counts.json'): MuMuQA.load(f)
    for name in ('dialogues.jsonl', 'corpus.jsonl'):
        f = mq.save(tmp_path/'m')
        (f/name).unlink()
        with pytest.raises(SourceError, match=name): MuMuQA.load(f)

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
def test_real_dialogues_ask_nothing_twice_and_splice(real):
    mq = real[1]
    assert all(repeats(ds)['dialogues that repeat a question']==0 for ds in mq.splits.values())
    gs = continuations(mq.short)[0]
    assert gs['dialogues with such turns'] > 100 and gs['of these, joining no two questions']==0
    assert gs['of these, continuing their own question'] < .1*gs['turns that refer back']

@needs_data
def test_real_files_in_any_order(real):
    names = ('dev_gold_only', 'dev_200')
    read = lambda order: usable(join_sources([read_source(Path(DATA)/'musique'/f'musique_ans_{n}.jsonl') for n in order]))[0]
    assert {q.id: q for q in read(names)} == {q.id: q for q in read(names[::-1])}

@needs_data
def test_real_questions_reveal_nothing(real): assert giveaways(real[1].dialogues)==[]
