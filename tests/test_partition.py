"Splits of random and of real questions: nothing shared, quotas kept, the fewest dropped, the same every time."
import os, random, subprocess, sys, time
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
import pytest
from cmtrag.partition import (PartitionError, _conflicts, _fewest, audit, components, drop_duplicates, jaccard_pairs, jaccard_pairs_slow, keep_split, norm_key,
                              partition, propagate_labels, source_keys)
from cmtrag.sources import Corpus, Hop, Question, make_paragraph, read_source

def questions(r, n, names=None, cluster=9):
    "Random questions whose titles and bridges cluster; some keys are shared by everybody"
    names,out = names or 3*n,[]
    for i in range(n):
        c,hops = r.randrange(max(1, n//cluster)),r.choices([2,3,4], [5,3,2])[0]
        name = lambda: f'hub {r.randrange(5)}' if r.random() < .01 else f'entity {c}.{r.randrange(12)}'
        hs = tuple(Hop(f'[A_{k}] >> r' if k else f'start {i} >> r', name() if k+1 < hops else f'answer {r.randrange(names)}') for k in range(hops))
        out.append(Question(f'q{i:05}', f'Question {i} {r.randrange(99)}?', hs[-1].answer, hops=hs, titles=tuple(name() for _ in hs)))
    r.shuffle(out)
    return out

def holds(p, qs, corpus=None):
    "What every partition promises"
    ids = [[q.id for q in side] for side in (p.train, p.dev, p.dropped)]
    assert sorted(sum(ids, [])) == sorted(q.id for q in qs) and all(len(set(x)) == len(x) for x in ids)
    place = {q.id: n for n,q in enumerate(qs)}
    for x in ids: assert x == sorted(x, key=place.get)
    keys = {q.id: set(source_keys(q, corpus)) for q in qs}
    held = lambda x: set().union(*(keys[i] for i in x)) if x else set()
    assert not held(ids[0]) & held(ids[1])
    assert set(p.shared) == set(ids[2]) and all(ks and set(ks) <= keys[i] for i,ks in p.shared.items())
    r = p.report
    assert (r['train'], r['dev'], r['dropped'], r['questions']) == (*map(len, ids), len(qs))
    for side,x in zip(('train', 'dev'), ids):
        comps = components({i: tuple(sorted(keys[i])) for i in x})
        assert (r[f'components_{side}'], r[f'largest_{side}']) == (len(comps), len(comps[0]) if comps else 0)

@pytest.mark.parametrize('seed', range(12))
def test_random_questions(seed):
    r = random.Random(seed)
    qs = questions(r, r.choice([60, 300, 1500]), cluster=r.choice([3, 6, 9]))
    for salt in ('', 'x'):
        p = partition(qs, salt=salt)
        holds(p, qs)
        if len(qs) < 300: assert 1 <= len(p.dev) <= 30
        else: assert .085 <= len(p.dev)/len(qs) <= .115 and p.report['hops_apart'] <= (5 if len(qs) == 1500 else 10), p.report
        assert p.report['dev_wanted'] == round(.1*len(qs))

@pytest.mark.parametrize('share', [.02, .1, .3, .5, .7, .9, .98])
def test_any_share(share):
    qs = questions(random.Random('share'), 1000, cluster=4)
    p = partition(qs, dev_share=share)
    holds(p, qs)
    assert abs(len(p.dev)/len(qs)-share) < .03

def test_order_of_the_file_and_hash_seed_do_not_matter():
    qs = questions(random.Random(3), 400)
    p,q = partition(qs, salt='s'),partition(qs[::-1], salt='s')
    assert {x.id for x in p.dev} == {x.id for x in q.dev} and {x.id for x in p.dropped} == {x.id for x in q.dropped} and p.shared == q.shared and p.report == q.report
    code = "import random, sys; sys.path.insert(0, 'tests'); from test_partition import questions; from cmtrag.partition import partition; p = partition(questions(random.Random(3), 400), salt='s'); print(' '.join(x.id for x in p.dev), p.shared, p.report)"
    said = {subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': h, 'PYTHONPATH': '.'}, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True).stdout for h in ('0', '1')}
    assert len(said) == 1 and p.dev[0].id in said.pop()

def test_another_salt_is_another_split():
    qs = questions(random.Random(4), 600)
    assert len({frozenset(q.id for q in partition(qs, salt=s).dev) for s in 'abcde'}) == 5

def test_the_fewest_are_dropped():
    r = random.Random(5)
    for _ in range(150):
        keys = {f'q{i}': tuple(sorted({f'k{r.randrange(9)}' for _ in range(r.randint(1, 2))})) for i in range(11)}
        adj = _conflicts(keys, {i for i in keys if r.random() < .4})
        out,pairs = _fewest(adj),[(d,t) for d,ts in adj.items() for t in ts]
        assert all(d in out or t in out for d,t in pairs)
        assert not any(all(d in c or t in c for d,t in pairs) for c in combinations(sorted(keys), len(out)-1)) if out else not pairs

def test_long_chains_of_conflicts_do_not_overflow():
    n = 5000
    adj = {f'd{i:05}': {f't{i:05}', f't{i+1:05}'} for i in range(n)}
    assert len(_fewest(adj)) == n

def test_one_component_cannot_be_split():
    qs = [Question(f'q{i}', f'What {i}?', f'a{i}', hops=(Hop('x >> y', f'b{i}'), Hop('[A_1] >> z', f'a{i}')), titles=('Everything',)) for i in range(50)]
    with pytest.raises(PartitionError, match='50 questions hang together in 1 components, the largest has 50'): partition(qs)
    with pytest.raises(PartitionError, match='^mine: no question is left for dev: 50 questions hang together'): partition(qs, name='mine')
    with pytest.raises(PartitionError, match='^train: each of its 40 questions shares a title or a bridge entity with dev'): keep_split(qs[:40], qs[40:])

@pytest.mark.parametrize('n', [0, 1])
def test_too_few(n):
    with pytest.raises(PartitionError, match=f'^a.jsonl: {n} questions: two sides need at least two'): partition(questions(random.Random(0), 5)[:n], name='a.jsonl')

def test_tiny_ones():
    r,made = random.Random(6),0
    for n in range(2, 30):
        qs = questions(r, n, cluster=1)
        try: p = partition(qs)
        except PartitionError as e: assert 'hang together' in str(e); continue
        holds(p, qs); made += 1
        assert p.train and p.dev
    assert made > 15

@pytest.mark.parametrize('share', [0, 1, -.1, 1.5, float('nan')])
def test_impossible_shares(share):
    with pytest.raises(PartitionError, match='between 0 and 1'): partition(questions(random.Random(0), 20), dev_share=share)

def test_ids_that_come_twice():
    qs = questions(random.Random(7), 20)
    with pytest.raises(PartitionError, match=f"1 question ids occur twice, among them '{qs[3].id}'"): partition([*qs, qs[3]])
    with pytest.raises(PartitionError, match='^here: 1 question ids occur twice'): partition([*qs, qs[3]], name='here')
    for a,b,says in ((qs, qs[3:5], f"a: 2 question ids occur twice, here and in b, among them '{qs[3].id}'"), ([*qs[4:], qs[4]], qs[:4], f"a: 1 .* '{qs[4].id}'"), (qs[4:], [*qs[:4], qs[0]], f"b: 1 .* '{qs[0].id}'")):
        with pytest.raises(PartitionError, match=f'^{says}'): keep_split(a, b, names=('a', 'b'))

@pytest.mark.parametrize('side', ['train', 'dev'])
def test_a_given_side_that_is_empty(side):
    qs = questions(random.Random(7), 20)
    with pytest.raises(PartitionError, match=f'^{side}.jsonl: no question'): keep_split(*((), qs) if side=='train' else (qs, ()), names=('train.jsonl', 'dev.jsonl'))

def test_paragraphs_must_be_in_the_corpus():
    p = make_paragraph('Orm', 'A town.')
    q = replace(questions(random.Random(8), 1)[0], gold_ids=(p.id,))
    assert 'title orm' in source_keys(q, Corpus([p]))
    with pytest.raises(PartitionError, match=f"'{q.id}': supporting paragraph {p.id} is not in the corpus"): source_keys(q, Corpus())

@pytest.mark.parametrize('seed', range(5))
def test_a_given_split_is_kept(seed):
    r = random.Random(seed)
    qs = questions(r, 500, cluster=20)
    dev,train = qs[:60],qs[60:]
    p = keep_split(train, dev)
    holds(p, [*train, *dev])
    keys = {q.id: set(source_keys(q)) for q in qs}
    held = set().union(*(keys[q.id] for q in dev))
    assert p.dev == dev and [q.id for q in p.dropped] == [q.id for q in train if keys[q.id] & held] and p.dropped
    assert all(set(ks) == keys[i] & held for i,ks in p.shared.items())

def test_final_answers_are_no_keys():
    q = questions(random.Random(9), 1)[0]
    assert not any(norm_key(q.answer) in k for k in source_keys(q))

def test_near_duplicates_need_the_same_answers():
    hops = lambda a,b: (Hop('Orm >> mayor', a), Hop('[A_1] >> age', b))
    ask = 'How old is the man who is mayor of the town of Orm in the north'
    qs = [Question('a', ask, '50', hops=hops('Ibb', '50')), Question('b', f'{ask} now', '50', hops=(Hop('Who is mayor of Orm?', 'Ibb'), hops('Ibb', '50')[1])),
          Question('c', f'{ask} today', '50', hops=(Hop('Who rules Orm?', 'Ada'), hops('Ada', '50')[1])), Question('d', f'{ask} then', '51', hops=(Hop('Orm >> boss', 'Ibb'), hops('Ibb', '51')[1]))]
    assert [q.id for q in drop_duplicates(qs)[1]] == [] and [q.id for q in drop_duplicates(qs, .82)[1]] == ['b']
    assert [q.id for q in drop_duplicates(qs[::-1], .82)[1]] == ['b']

def test_near_duplicates_as_by_comparing_all():
    r,words = random.Random(10),[f'w{i}' for i in range(25)]
    qs = []
    for i in range(300):
        a = r.choice('xy')
        qs.append(Question(f'q{i:03}', ' '.join(r.sample(words, r.randrange(3, 20))), a, hops=(Hop(f'o{i} >> s', r.choice('uv')), Hop('[A_1] >> t', a))))
    for th in (.5, .82):
        gone = {q.id for q in drop_duplicates(qs)[1]}
        for i,j in jaccard_pairs_slow([q.question for q in qs], [q.question for q in qs], th):
            if i < j and [h.answer for h in qs[i].hops] == [h.answer for h in qs[j].hops] and not {qs[i].id, qs[j].id} & gone: gone.add(qs[j].id)
        assert gone == {q.id for q in drop_duplicates(qs, th)[1]}

def test_datasketch_finds_no_pair_that_we_miss():
    "The usual library proposes near-duplicates by chance; what it proposes and is one must be among ours."
    ds = pytest.importorskip('datasketch')
    r,words = random.Random(11),[f'w{i}' for i in range(40)]
    texts = [' '.join(r.sample(words, 12)) for _ in range(150)]
    texts += [t+' more' for t in texts]
    lsh,sets = ds.MinHashLSH(threshold=.7, num_perm=128),[frozenset(t.split()) for t in texts]
    def sketch(s):
        m = ds.MinHash(num_perm=128)
        m.update_batch([w.encode() for w in sorted(s)])
        return m
    ms = [sketch(s) for s in sets]
    for i,m in enumerate(ms): lsh.insert(i, m)
    found = {(i,j) for i,m in enumerate(ms) for j in lsh.query(m) if len(sets[i]&sets[j]) > .82*len(sets[i]|sets[j])}
    assert len(found) > 400 and found <= set(jaccard_pairs(texts, texts)) == set(jaccard_pairs_slow(texts, texts))

def test_twenty_thousand_questions_in_seconds():
    qs = questions(random.Random(12), 22_000)
    t = time.process_time()
    p = partition(qs)
    assert time.process_time()-t < 20
    assert .09 <= len(p.dev)/len(qs) <= .11 and len(p.dropped) <= .01*len(qs) and p.report['hops_apart'] <= 5

DATA = os.environ.get('CMTRAG_DATA')

@pytest.mark.skipif(not DATA, reason='CMTRAG_DATA is not set')
def test_real_questions_of_three_schemas():
    src = [read_source(Path(DATA)/'musique'/f'musique_ans_{n}.jsonl') for n in ('dev_200', 'dev_gold_only', 'dev_decompositions')]
    qs,corpus = [q for s in src for q in s.questions],Corpus(p for s in src for p in s.corpus)
    assert len(qs) == 1998 and all(bool(q.titles) != bool(q.gold_ids) for q in qs)
    for salt in ['', *map(str, range(9))]:
        p = partition(qs, corpus, salt=salt)
        holds(p, qs, corpus)
        assert .09 <= len(p.dev)/1998 <= .11 and len(p.dropped) <= 19
        mix = [Counter(len(q.hops) for q in side) for side in (p.train, p.dev)]
        assert all(abs(mix[0][h]/len(p.train)-mix[1][h]/len(p.dev)) <= .05 for h in (2,3,4))
        assert all(v == 0 for k,v in audit(p.train, p.dev, corpus).items() if k in ('titles_and_bridges', 'paragraphs', 'question_ids'))

@pytest.mark.skipif(not DATA, reason='CMTRAG_DATA is not set')
def test_the_title_of_a_document_id_is_that_of_its_passage():
    "Read with and without their passages, the same rows have the same keys"
    import json
    path = Path(DATA)/'musique'/'musique_ans_dev_gold_only.jsonl'
    whole = read_source(path)
    import tempfile
    with tempfile.TemporaryDirectory() as d:
        f = Path(d)/'bare.jsonl'
        rows = [json.loads(s) for s in path.read_text(encoding='utf-8').splitlines()]
        f.write_text(''.join(json.dumps({k:v for k,v in row.items() if k != 'support_paragraphs'})+'\n' for row in rows), encoding='utf-8')
        bare = read_source(f)
    assert [source_keys(q, whole.corpus) for q in whole.questions] == [source_keys(q, bare.corpus) for q in bare.questions]
