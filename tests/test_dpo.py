"Preferences: rewards are exact, the pool is whole, nothing leaks between candidates, the first step is ln 2."
import dataclasses, json, random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip('torch')

from cmtrag.checkpoints import build_slots
from cmtrag.curriculum import curriculum, memory_lines
from cmtrag.dpo import (DPO_CHECKS, DPO_DEFAULTS, DpoError, DpoTrainer, NotedGrammar, Pair, PoolTurn, Scored, candidate_pool, carry_out, check_start, contexts, dpo_loss, dpo_recipe_of, exact, f1s, load_dpo_recipe, match, pair_batch, pair_rows, pairs, plan_logps, plan_pairs,
                        pool_hash, preferences, read_pool, reference_logps, sample_candidates, small_corpus, train_dpo, training_dialogues, tune, word_overlap)
from cmtrag.generator import StreamGenerator, load_generator
from cmtrag.llm import ScriptedLLM
from cmtrag.mamba import Mamba2LM, MambaConfig, MambaError
from cmtrag.metrics import exact_f1, token_f1
from cmtrag.profiles import ProfileError
from cmtrag.reader import Reader
from cmtrag.retrieval import HashEncoder, Index, Retriever
from cmtrag.runs import ParameterError
from cmtrag.sft import Stage, adapt, load_recipe, merge, new_twin, plan_logits, read_curve, save_generator
from cmtrag.sources import Corpus
from cmtrag.stream import MEMORY_TOKENS, READ, TAG_TOKEN, Layout, Lexicon, Scribe
from cmtrag.world import world_source

TINY = dict(hidden_size=32, num_hidden_layers=2, state_size=16, head_dim=16)

@pytest.fixture(scope='module')
def talks(): return curriculum(1, 0, dict(single=2, short=12, long=0)).after['short'][:6]

@pytest.fixture(scope='module')
def scribe(talks):
    texts = [s for d in talks for u in d.turns for s in (u.query, *(t.draft.sub_question for t in u.traces))]
    return Scribe(build_slots(texts, at_least=2, extra=(*MEMORY_TOKENS, TAG_TOKEN)), Layout(memory=True, tags=True))

def fresh(scribe):
    torch.manual_seed(1)
    return Mamba2LM(MambaConfig(vocab_size=-(-scribe.tok.vocab_size//8)*8, **TINY)).eval()

@pytest.fixture(scope='module')
def gen(scribe): return StreamGenerator(fresh(scribe), scribe, most=60)

@pytest.fixture(scope='module')
def retriever(talks):
    land = world_source('train', seed=0).corpus
    c = Corpus([*(land[p] for p in sorted({p for d in talks for u in d.turns for p in u.para_ids})), *list(land)[:20]])
    return Retriever(Index.build(c, HashEncoder(128)), c)

def answer(prompt):
    "A made-up reader: its answer depends on everything that it is shown."
    text = prompt if isinstance(prompt, str) else ' '.join(m['content'] for m in prompt)
    words = [w for w in text.split() if w[:1].isupper() and w.isalpha()]
    return ' '.join(random.Random(text).sample(words, 2)) if len(words)>1 else 'nobody'

@pytest.fixture(scope='module')
def reader(): return Reader(ScriptedLLM(answer), prompt='chat')

@pytest.fixture(scope='module')
def recipe(): return load_dpo_recipe('dpo-small', similarity=.2, most=60)

def make(gen, talks, retriever, reader, path, recipe, **kw): return candidate_pool(gen, talks, retriever, reader, path, recipe, like=word_overlap, **kw)

@pytest.fixture(scope='module')
def made(gen, talks, retriever, reader, recipe, tmp_path_factory):
    p = tmp_path_factory.mktemp('pool')/'pool.jsonl'
    return make(gen, talks, retriever, reader, p, recipe),p

@pytest.fixture(scope='module')
def rows(gen, talks, made):
    "Two candidates of every turn, the first as the better one: what these random plans are worth says little."
    ps = [Pair(t.dialogue, t.turn, t.candidates[0], t.candidates[-1], Fraction(1)) for t in made[0]]
    return pair_rows(gen, talks, ps, 5120)[0]

# --- rewards ---

def test_exact_is_precision_and_recall():
    "Against the textbook's formula, in fractions of its own."
    rng = random.Random(0)
    say = lambda: rng.choices(['quell','river','orm','a1','90'], k=rng.randint(1, 6))
    for _ in range(1000):
        p,g = say(),say()
        same = sum(min(p.count(w), g.count(w)) for w in set(p))
        P,R = Fraction(same, len(p)),Fraction(same, len(g))
        want = 2*P*R/(P+R) if same else 0
        assert exact_f1(' '.join(p), 'nothing of it', [' '.join(g)])==want and token_f1(' '.join(p), ' '.join(g))==float(want)
    assert exact_f1('the', 'a')==1 and exact_f1('the', 'river')==exact_f1('', 'river')==0

def scored(i, final, sub=0, **kw): return Scored((i,), (True,), final=exact(final), sub=exact(sub), **kw)
def turn(*cs, n=1): return PoolTurn('d', n, '', cs)

def test_the_gap_is_exact():
    "Fractions whose difference is 1/20, and whose floats differ by less: they count. Just below does not."
    low = [(a, b) for b in range(2, 41) for a in range(1, b) if float(Fraction(a, b)+Fraction(1, 20))-float(Fraction(a, b))<.05]
    assert len(low)>50
    for a,b in low: assert len(pairs([turn(scored(1, Fraction(a, b)), scored(2, Fraction(a, b)+Fraction(1, 20)))])[0])==1
    assert not pairs([turn(scored(1, Fraction(1, 3)), scored(2, Fraction(1, 3)+Fraction(1, 20)-Fraction(1, 10**30)))])[0]
    ps,_ = pairs([turn(scored(1, 0, Fraction(1, 4)), scored(2, 0, 0))], gamma=.2)                  # .2·¼ = 1/20 as well
    assert ps[0].gap==Fraction(1, 20)
    for bad in (0, '', 'x', float('nan')):
        with pytest.raises(DpoError): pairs([], gap=bad)

def test_a_sweep_needs_one_pool():
    pool = [turn(scored(1, 0, 1), scored(2, Fraction(1, 2), 0), scored(3, Fraction(1, 4), Fraction(1, 2)))]
    best = {g: pairs(pool, g)[0][0].chosen.ids[0] for g in (0, .2, .4, .6, .8, 1.)}
    assert best=={0: 2, .2: 2, .4: 2, .6: 1, .8: 1, 1.: 1}
    assert [pairs(pool, g)[0][0].rejected.ids[0] for g in (0, 1.)]==[1, 2]

def test_ties_and_counts():
    pool = [turn(scored(1, 1), scored(2, 0), scored(3, 1), scored(2, 0, same=1)), turn(scored(1, 1), Scored((7,), (True,), 'no plan'), n=2), turn(scored(1, 1), scored(2, 1), n=3)]
    ps,n = pairs(pool)
    assert [(p.chosen, p.rejected) for p in ps]==[(pool[0].candidates[0], pool[0].candidates[1])]
    assert n==dict(turns=3, candidates=8, invalid=1, duplicates=1, too_few=1, no_gap=1, pairs=1)

def test_matching():
    assert match(np.zeros((0, 3)))==[] and match(np.full((2, 2), .55))==[(0, 0), (1, 1)] and match(np.full((2, 2), .549))==[]
    assert match(np.array([[.6, .9], [.7, .95]]))==[(0, 0), (1, 1)]

def test_gold_plans_earn_the_most(gen, talks, retriever):
    "The gold plan with a reader that knows: final and sub are 1 (sub is 0 where nothing is intermediate)."
    for d in talks[:4]:
        for c in contexts(gen, d):
            drafts = tuple(t.draft for t in c.gold.traces)
            answers = iter([*(t.answer for t in c.gold.traces), c.gold.answer])
            t = carry_out(c, drafts, retriever, Reader(ScriptedLLM(lambda p: next(answers)), prompt='chat'))
            assert f1s(c, drafts, t, word_overlap)==(1, int(len(drafts)>1), len(drafts)-1)

def test_a_wrong_sub_answer_does_not_pay(gen, talks, retriever):
    "A reader that errs in the first step lowers the reward, though later sub-questions are resolved with its error."
    c = next(c for d in talks for c in contexts(gen, d) if len(c.gold.traces)>2)
    drafts,n = tuple(t.draft for t in c.gold.traces),len(c.gold.traces)-1
    answers = iter(['Nonsense Nowhere', *(t.answer for t in c.gold.traces[1:]), c.gold.answer])
    t = carry_out(c, drafts, retriever, Reader(ScriptedLLM(lambda p: next(answers)), prompt='chat'))
    assert f1s(c, drafts, t, word_overlap)==(1, Fraction(n-1, n), n)

# --- candidates ---

def test_what_the_runtime_writes_is_noted(gen, talks):
    tok,tags = gen.scribe.tok,0
    for c in contexts(gen, talks[0]):
        for x in sample_candidates(gen, c.state, c.query, c.next_id, 6, np.random.default_rng(c.turn)):
            ts = [tok.tokens[i] for i in x.ids]
            want = [not (b=='[TRACE]' or b==TAG_TOKEN) for b in ('', *ts[:-1])]
            assert list(x.wrote)==want and not x.error
            tags += ts.count(TAG_TOKEN)
    assert tags

def test_gold_plans_and_sampled_ones_agree_on_it(talks):
    "`Scribe.plan` marks as read what the grammar writes from its queue: numbers and tags."
    keys = [k for d in talks for r,mem in memory_lines(d) for k in (*(k for k,_ in r), *(k for ks in mem.values() for k in ks))]
    s = Scribe(build_slots([*keys, *(x for d in talks for u in d.turns for x in (u.query, *(t.draft.sub_question for t in u.traces), *(t.draft.keywords for t in u.traces)))], at_least=1,
                           extra=(*MEMORY_TOKENS, TAG_TOKEN)), Layout(memory=True, tags=True))
    lex,n = Lexicon(s, s.tok.vocab_size),Counter()
    for d in talks:
        table = s.tok.start()
        for u,(r,mem) in zip(d.turns, memory_lines(d)):
            _,asked = s.prompt(u.query, table)
            ids,kinds,table = s.plan([t.draft for t in u.traces], u.traces[0].id, asked, refs=r, memory=[mem.get(t.id, ()) for t in u.traces])
            table = s.note(ids, table)
            if s.tok.unk in ids: n['unknown'] += 1; continue
            g = NotedGrammar(lex, u.traces[0].id, asked, 500)
            for i in ids:
                assert g.queue[0]==i if g.queue else g.options()[i]
                g.push(i)
            assert g.done and g.wrote==[k!=READ for k in kinds]
            n.update(plans=1, tags=ids.count(s.tok.id(TAG_TOKEN)))
    assert n['plans']>10 and n['tags']>10, n

def test_invalid_ones_are_kept_and_filtered(scribe, talks, retriever, reader, recipe, tmp_path):
    free = StreamGenerator(fresh(scribe), scribe, most=60, constrained=False)
    pool = make(free, talks[:1], retriever, reader, tmp_path/'p.jsonl', recipe)
    ps,n = pairs(pool)
    assert n['invalid']==n['candidates']==4*len(talks[0].turns) and n['too_few']==n['turns'] and not ps      # random weights write no plan
    assert all(c.error and c.final is None for t in pool for c in t.candidates)

def test_candidates_do_not_feel_each_other(gen, talks, retriever, reader):
    c = list(contexts(gen, talks[0]))[1]
    cands = sample_candidates(gen, c.state, c.query, c.next_id, 5, np.random.default_rng(0))
    h,table,dag = (c.state.h.ssm.clone(), c.state.h.conv.clone()),c.state.table.dump(),c.dag.to_list()
    go = lambda order: {i: dataclasses.replace(carry_out(c, cands[i].drafts, retriever, reader), seconds={}) for i in order}
    assert go(range(5))==go(range(4, -1, -1))==go([2, 2, 0, 4, 1, 3])
    assert torch.equal(c.state.h.ssm, h[0]) and torch.equal(c.state.h.conv, h[1]) and c.state.table.dump()==table and c.dag.to_list()==dag
    t = go([0])[0]
    assert t.turn==2 and t.nodes[0].id==c.next_id

# --- the pool ---

def test_a_disturbed_pool_is_the_pool(gen, talks, retriever, reader, recipe, made, tmp_path):
    pool,path = made
    whole = path.read_bytes()
    assert len(pool)==sum(len(d.turns) for d in talks) and read_pool(path)==pool
    for cut in (1, len(whole)//3, whole.index(b'\n')+1):
        p = tmp_path/f'{cut}.jsonl'
        p.write_bytes(whole[:cut])
        assert make(gen, talks, retriever, reader, p, recipe)==pool and p.read_bytes()==whole
    class Broken(Exception): pass
    left = [60]
    def tired(prompt):
        left[0] -= 1
        if not left[0]: raise Broken
        return answer(prompt)
    with pytest.raises(Exception): make(gen, talks, retriever, Reader(ScriptedLLM(tired), prompt='chat'), tmp_path/'b.jsonl', recipe)
    assert 0<len(read_pool(tmp_path/'b.jsonl'))<len(pool)
    assert make(gen, talks, retriever, reader, tmp_path/'b.jsonl', recipe)==pool and (tmp_path/'b.jsonl').read_bytes()==whole
    make(gen, talks, retriever, reader, path, recipe)
    assert path.read_bytes()==whole                                         # nothing comes twice

def test_another_pool_is_refused(gen, talks, retriever, reader, recipe, made):
    whole = made[1].read_bytes()
    for kw in (dict(recipe=dataclasses.replace(recipe, seed=1)), dict(recipe=recipe, mark='else'), dict(recipe=recipe, k=3)):
        with pytest.raises(DpoError, match='pool.jsonl line 1: made is'): make(gen, talks, retriever, reader, made[1], **kw)
    assert make(gen, talks, retriever, reader, made[1], dataclasses.replace(recipe, gamma=1., gap=.1, beta=1.))==made[0]      # these do not decide it
    assert made[1].read_bytes()==whole

def spoil(line, what):
    d = json.loads(line)
    what(d)
    return json.dumps(d).encode()

@pytest.mark.parametrize('what,said', [
    (lambda l: b'{"dialogue": ', 'not JSON'), (lambda l: b'[]', 'expected a mapping'), (lambda l: b'\xff'+l, 'not UTF-8'), (lambda l: b'', 'not JSON'),
    (lambda l: spoil(l, lambda d: d.pop('turn')), 'turn is None'), (lambda l: spoil(l, lambda d: d.update(turn=0)), 'turn is 0'), (lambda l: spoil(l, lambda d: d.update(dialogue=3)), 'dialogue is 3'),
    (lambda l: spoil(l, lambda d: d['candidates'].append(7)), 'candidates.4.: not a candidate'),
    (lambda l: spoil(l, lambda d: d['candidates'][2].update(wrote='01')), 'candidates.2.: wrote'), (lambda l: spoil(l, lambda d: d['candidates'][1].update(final='1/0')), 'candidates.1.: final'),
    (lambda l: spoil(l, lambda d: d['candidates'][1].update(sub=.5)), 'candidates.1.: sub'), (lambda l: spoil(l, lambda d: d['candidates'][1].update(final='3/2')), 'final'),
    (lambda l: spoil(l, lambda d: d['candidates'][0].pop('ids')), 'candidates.0.: ids'), (lambda l: spoil(l, lambda d: d['candidates'][0].update(ids=[1, -2])), 'ids'),
    (lambda l: spoil(l, lambda d: d['candidates'][0].update(same=3)), 'same is 3'), (lambda l: spoil(l, lambda d: d['candidates'][0].update(error='x')), 'final'),
    (lambda l: spoil(l, lambda d: d['candidates'][0].update(extra=1)), 'extra')])
def test_garbled_lines_are_named(made, tmp_path, what, said):
    ls = made[1].read_bytes().split(b'\n')
    ls[2] = what(ls[2])
    (tmp_path/'x.jsonl').write_bytes(b'\n'.join(ls))
    with pytest.raises(DpoError, match=f'x.jsonl line 3: .*{said}'): read_pool(tmp_path/'x.jsonl')

def test_double_lines_and_missing_files(made, tmp_path):
    ls = made[1].read_bytes().split(b'\n')
    (tmp_path/'x.jsonl').write_bytes(b'\n'.join([ls[0], ls[1], ls[0], b'']))
    with pytest.raises(DpoError, match='line 3: turn 1 of dialogue .* is in line 1 already'): read_pool(tmp_path/'x.jsonl')
    with pytest.raises(DpoError, match='no such pool'): read_pool(tmp_path/'y.jsonl')

# --- rows and log-probabilities ---

def test_a_row_is_what_the_state_has_read(gen, talks, made, rows):
    at = 0
    for d in talks[:3]:
        for c in contexts(gen, d):
            said,_ = gen.model.prefill([gen.scribe.prompt(c.query, c.state.table)[0]], state=c.state.h)
            ids = torch.tensor([rows[at]['context']])
            last = torch.zeros_like(ids, dtype=torch.bool); last[0,-1] = True
            with torch.no_grad(): assert (plan_logits(gen.model, ids, last)-said).abs().max()<1e-4
            at += 1

def test_padding_changes_nothing_and_the_runtime_does_not_count(scribe, rows):
    m = fresh(scribe)
    b = pair_batch(rows[:6])
    n = [len(r['context'])+len(r[k]) for k in ('chosen','rejected') for r in rows[:6]]
    with torch.no_grad():
        lp = plan_logps(m, b)
        alone = torch.stack([plan_logps(m, {k: v[i:i+1,:n[i]] for k,v in b.items()})[0] for i in range(12)])
        by_hand = []
        for i in range(12):
            p = torch.log_softmax(m(input_ids=b['ids'][i:i+1,:n[i]]).logits[0].double(), -1)
            by_hand.append(sum(p[t-1,b['ids'][i,t]] for t in range(1, n[i]) if b['wrote'][i,t]))
    assert ((lp-alone).abs()/alone.abs()).max()<1e-5 and ((lp-torch.stack(by_hand)).abs()/lp.abs()).max()<1e-5
    assert not b['wrote'].all() and (b['ids'][~b['wrote']]==scribe.tok.id('[T_1]')).any()
    every = dict(b, wrote=torch.stack([torch.arange(b['ids'].shape[1])<k for k in n]) & (torch.arange(b['ids'].shape[1])>=torch.tensor([len(r['context']) for r in rows[:6]*2])[:,None]))
    with torch.no_grad(): assert (plan_logps(m, every)<lp-.5).all()

def test_long_histories_lose_whole_turns(gen, talks, made):
    ps = [Pair(t.dialogue, t.turn, t.candidates[0], t.candidates[-1], Fraction(1)) for t in made[0]]
    full,_ = pair_rows(gen, talks, ps, 10**6)
    most = sorted(len(r['context'])+max(len(r['chosen']), len(r['rejected'])) for r in full)[len(full)//2]
    cut,n = pair_rows(gen, talks, ps, most)
    assert n['shortened'] and n['turns_lost']>=n['shortened'] and n['rows']+n['too_long']==len(ps)
    q = gen.scribe.tok.id('[Q]')
    assert all(r['context'][0]==q and len(r['context'])+max(len(r['chosen']), len(r['rejected']))<=most for r in cut)
    with pytest.raises(DpoError, match='not among the dialogues'): pair_rows(gen, talks[:1], ps, most)

# --- training ---

def test_the_first_step_is_ln_2(scribe, rows):
    "Same weights, new adapters: loss ln 2 and margin 0 to the last bit, with a gradient."
    r = load_dpo_recipe('dpo-small', batch=3, lora=True)
    batches = plan_pairs(r, 12)
    ref = reference_logps(fresh(scribe), rows[:12], batches)
    for m in (fresh(scribe), adapt(fresh(scribe), Stage('dpo'))):
        m.train()
        for b in batches:
            lp = plan_logps(m, pair_batch([rows[i] for i in b]))
            loss,margin = dpo_loss(lp[:3], lp[3:], *ref[b].T, r.beta)
            assert margin.tolist()==[0.]*3 and loss.tolist()==[torch.tensor(2.).log().item()]*3
        loss.mean().backward()
        assert sum(float(p.grad.abs().sum()) for p in m.parameters() if p.grad is not None)>0

def test_the_loss_by_hand():
    l,m = dpo_loss(*map(torch.tensor, ([-3.], [-5.], [-4.], [-4.5])), beta=.5)
    assert m.item()==pytest.approx(.5*((-3+4)-(-5+4.5))) and l.item()==pytest.approx(np.log(1+np.exp(-m.item())))

@pytest.mark.parametrize('lora', [False, True])
def test_margins_grow_and_a_stopped_training_is_the_training(scribe, rows, tmp_path, monkeypatch, lora):
    r = load_dpo_recipe('dpo-small', batch=2, epochs=3, lora=lora, rate=5e-3 if lora else 1e-3, every=4, look=2)
    some = rows[:8]
    ref = reference_logps(fresh(scribe), some, plan_pairs(r, 8))
    m,info = train_dpo(fresh(scribe), r, some, tmp_path/'a')
    assert info['steps']==12 and info['first_margin']==0 and info['first_loss']==pytest.approx(np.log(2)) and info['last_margin']>0
    assert type(m) is Mamba2LM and not any('lora' in n for n,_ in m.named_parameters())
    now = preferences(m, some, ref, r)
    assert now['margin']>.01 and now['accuracy']>.7 and now['loss']<np.log(2)
    loss = DpoTrainer.compute_loss
    def stop(self, *args, **kw):
        if self.state.global_step==6: raise KeyboardInterrupt
        return loss(self, *args, **kw)
    monkeypatch.setattr(DpoTrainer, 'compute_loss', stop)
    with pytest.raises(KeyboardInterrupt): train_dpo(fresh(scribe), r, some, tmp_path/'b')
    monkeypatch.setattr(DpoTrainer, 'compute_loss', loss)
    again,info2 = train_dpo(fresh(scribe), r, some, tmp_path/'b')
    assert info2['resumed_at']==4 and all(torch.equal(a, b) for a,b in zip(m.state_dict().values(), again.state_dict().values()))
    same = lambda f: [(c['step'], c['loss'], c['margin'], c['accuracy']) for c in read_curve(f) if 'margin' in c]
    assert same(tmp_path/'a')==same(tmp_path/'b')
    third,_ = train_dpo(fresh(scribe), r, some, tmp_path/'b')                                # everything is done: loaded only
    assert all(torch.equal(a, b) for a,b in zip(m.state_dict().values(), third.state_dict().values()))
    with pytest.raises(DpoError, match='training.json: training is'): train_dpo(fresh(scribe), r, some[:4], tmp_path/'b')
    with pytest.raises(DpoError, match='training.json: training is'): train_dpo(fresh(scribe), dataclasses.replace(r, beta=.1), some, tmp_path/'b')

def test_merged_adapters_say_the_same(scribe, rows, tmp_path):
    "Drift of the log-probabilities below 1e-4, relative; only the adapted projections have moved."
    m = adapt(fresh(scribe), Stage('dpo'))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            if p.requires_grad: p.add_(torch.randn_like(p)*.03)
        b = pair_batch(rows[:4])
        before = plan_logps(m, b)
        merged = merge(m)
        after = plan_logps(merged, b)
        base = plan_logps(fresh(scribe), b)
    assert ((after-before).abs()/before.abs()).max()<1e-4 and (after-base).abs().max()>1e-2
    moved = [k for k,v in merged.state_dict().items() if not torch.equal(v, fresh(scribe).state_dict()[k])]
    assert moved and all('in_proj' in k or 'out_proj' in k for k in moved)

def test_wrong_targets_fail_at_once(scribe, rows, tmp_path, monkeypatch):
    # That new rows of tokens survive saving and loading in another process is tested in test_sft.py (test_only_adapters_and_rows_move).
    import cmtrag.mamba as mamba
    r = load_dpo_recipe('dpo-small', lora=True)
    for targets,err in ((('in_proj',), MambaError), (('q_proj','v_proj'), ValueError)):
        monkeypatch.setattr(mamba, 'LORA_TARGETS', targets)
        with pytest.raises(err): train_dpo(fresh(scribe), r, rows[:2], tmp_path/'x')
    monkeypatch.undo()
    twin = new_twin(load_recipe('sft-small', model=TINY), scribe.tok.vocab_size)
    with pytest.raises(DpoError, match='adapters are for a Mamba-2'): train_dpo(twin, r, rows[:2], tmp_path/'y')
    with pytest.raises(DpoError, match='no pairs'): train_dpo(fresh(scribe), r, [], tmp_path/'z')

def test_the_twin_learns_them_too(scribe, rows, tmp_path):
    twin = new_twin(load_recipe('sft-small', model=TINY), scribe.tok.vocab_size)
    _,info = train_dpo(twin, load_dpo_recipe('dpo-small', batch=2, epochs=2, rate=1e-3, look=2), rows[:6], tmp_path)
    assert info['first_margin']==0 and info['last_margin']>0

def test_bad_numbers_stop_it(scribe, rows, tmp_path):
    m = fresh(scribe)
    with torch.no_grad(): m.backbone.embedding.weight.fill_(float('inf'))
    with pytest.raises(DpoError, match='step 1: the loss is'): train_dpo(m, load_dpo_recipe('dpo-small'), rows[:4], tmp_path)

# --- recipes ---

@pytest.mark.parametrize('change,said', [(dict(betta=1.), "did you mean 'beta'"), (dict(beta='x'), 'beta is'), (dict(lora=1), 'lora is'), (dict(beta=0.), 'beta is 0'), (dict(schedule='step'), 'schedule is'),
                                         (dict(precision='fp16'), 'precision is'), (dict(gap=0.), 'gap is'), (dict(gamma=2.), 'gamma is'), (dict(candidates=1), 'candidates is'), (dict(rate=float('nan')), 'rate is')])
def test_bad_recipes_are_named(change, said):
    with pytest.raises((DpoError, ProfileError), match=said): load_dpo_recipe('dpo-small', **change)

def test_recipes():
    with pytest.raises(ProfileError, match='dpo-none.yaml'): load_dpo_recipe('dpo-none')
    assert load_dpo_recipe('dpo-paper').lora and not load_dpo_recipe('dpo-small').lora and load_dpo_recipe('dpo-paper').hash!=load_dpo_recipe('dpo-small').hash

# --- runs ---

ROOT = Path(__file__).resolve().parent.parent
def code_cells(nb): return [''.join(c['source']) for c in json.loads((ROOT/'nbs'/f'{nb}.ipynb').read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code']

def start_run(nb, **params):
    "A run notebook up to and with the cell that checks its parameters, as papermill would inject them."
    ns,cs = {},code_cells(nb)
    at = next(i for i,s in enumerate(cs) if 'guard(globals()' in s)
    for i,s in enumerate(cs[:at+1]):
        if i==at: ns.update(params); s = s[:s.index('before=before)')+len('before=before)')]
        exec(s, ns)
    return ns['p']

@pytest.mark.parametrize('nb,params,said', [('44_dpo', dict(gamma=2), 'gamma=2: must be between 0 and 1'), ('44_dpo', dict(gama=.2), "did you mean 'gamma'"), ('44_dpo', dict(recipe='dpo-none'), 'dpo-none.yaml'),
    ('44_dpo', dict(start='nowhere'), 'no trace generator'), ('44_dpo', dict(answered=1), 'must be at least 2'), ('44_dpo', dict(reader='none'), 'reader'), ('45_gamma', dict(gammas='0,3'), 'between 0 and 1'),
    ('45_gamma', dict(gammas='.2,.2'), 'different numbers'), ('45_gamma', dict(gamma=.2), "unknown parameter 'gamma'"), ('58_table8', dict(dpo='sft-paper'), 'dpo='), ('66_figure6', dict(sweep='outputs'), 'no finished run')])
def test_a_wrong_parameter_stops_a_run_at_once(nb, params, said):
    with pytest.raises(ParameterError, match=said): start_run(nb, **params)

def test_run_defaults():
    ns = {}
    exec(next(s for s in code_cells('44_dpo') if "recipe = 'dpo-small'" in s), ns)
    assert {k: ns[k] for k in DPO_DEFAULTS}==DPO_DEFAULTS and vars(start_run('44_dpo'))==DPO_DEFAULTS
    assert start_run('45_gamma').gammas==[0., .2, .4, .6, .8, 1.] and start_run('45_gamma', gammas='0,1').gammas==[0., 1.]
    assert dpo_recipe_of(SimpleNamespace(**DPO_DEFAULTS))==load_dpo_recipe('dpo-small')

def test_held_out_worlds_are_refused():
    for seed in (1000, 2000):
        with pytest.raises(DpoError, match=f'world {seed} is held out'): training_dialogues(1, seed, 1)
    with pytest.raises(DpoError, match='world 1000 is held out'): training_dialogues(3, 998, 1)

def test_small_corpora_have_the_gold(talks, retriever):
    c = small_corpus(retriever.corpus, talks[:1], 3)
    gold = {i for u in talks[0].turns for i in u.para_ids}
    assert gold<={p.id for p in c} and len(c)==len(gold)+3

@pytest.fixture(scope='module')
def start(scribe, tmp_path_factory): return save_generator(tmp_path_factory.mktemp('start')/'generator', fresh(scribe), scribe, 'tiny', load_dpo_recipe('dpo-small'), half=False)

def test_a_sweep_reuses_the_pool_and_starts_from_one_checkpoint(start, talks, retriever, reader, recipe, tmp_path, monkeypatch):
    import cmtrag.dpo as dpo
    gen = load_generator(start, most=60)
    rs = [dataclasses.replace(recipe, gamma=g, most_steps=1, batch=2) for g in (0., 1.)]
    assert len({str(pool_hash(gen, talks, retriever, reader, r, like=word_overlap)) for r in rs})==1
    assert pool_hash(gen, talks, retriever, reader, rs[0], like=word_overlap)!=pool_hash(gen, talks, retriever, reader, dataclasses.replace(recipe, seed=7), like=word_overlap)
    pool = make(gen, talks, retriever, reader, tmp_path/'pool.jsonl', rs[0])
    monkeypatch.setattr(dpo, 'sample_candidates', lambda *a, **kw: pytest.fail('sampled again'))
    assert make(gen, talks, retriever, reader, tmp_path/'pool.jsonl', rs[1])==pool
    better = [dataclasses.replace(t, candidates=tuple(dataclasses.replace(c, final=exact(Fraction(i, 4)), sub=exact(0)) if not c.error else c for i,c in enumerate(t.candidates))) for t in pool]
    for r in rs:                                                     # the second would not have margin 0 if it began where the first ended
        _,info,curve = tune(start, gen, r, talks, better, tmp_path)
        check_start(info)
        assert info['pairs']>2 and curve[0]['margin']==0
    assert sorted(p.name for p in tmp_path.glob('training-*'))==sorted(f'training-{r.hash}' for r in rs)
    with pytest.raises(DpoError, match='not ln 2 and 0'): check_start(info | dict(first_loss=.7))
    with pytest.raises(DpoError, match='no pairs at gamma'): tune(start, gen, rs[0], talks, [], tmp_path)

def test_a_killed_run_goes_on(start, talks, retriever, reader, recipe, tmp_path, monkeypatch):
    "Killed in the pool, then in the training: the end is that of a run that was left alone."
    import cmtrag.dpo as dpo
    gen,r = load_generator(start, most=60),dataclasses.replace(recipe, batch=1, every=2, look=1, most_steps=5)
    def run(folder):
        pool = make(gen, talks[:3], retriever, reader, folder/'pool.jsonl', r)
        better = [dataclasses.replace(t, candidates=tuple(dataclasses.replace(c, final=exact(Fraction(i, 4)), sub=exact(0)) if not c.error else c for i,c in enumerate(t.candidates))) for t in pool]
        return pool,tune(start, gen, r, talks, better, folder)
    whole,(model,_,curve) = run(tmp_path/'a')
    sample,loss,n = dpo.sample_candidates,DpoTrainer.compute_loss,[]
    def killed(*a, **kw):
        n.append(1)
        if len(n)==4: raise KeyboardInterrupt
        return sample(*a, **kw)
    monkeypatch.setattr(dpo, 'sample_candidates', killed)
    with pytest.raises(KeyboardInterrupt): run(tmp_path/'b')
    assert len(read_pool(tmp_path/'b'/'pool.jsonl'))==3
    monkeypatch.setattr(dpo, 'sample_candidates', sample)
    def stop(self, *a, **kw):
        if self.state.global_step==3: raise KeyboardInterrupt
        return loss(self, *a, **kw)
    monkeypatch.setattr(DpoTrainer, 'compute_loss', stop)
    with pytest.raises(KeyboardInterrupt): run(tmp_path/'b')
    monkeypatch.setattr(DpoTrainer, 'compute_loss', loss)
    again,(model2,info,curve2) = run(tmp_path/'b')
    assert again==whole and info['resumed_at']==2 and [c['loss'] for c in curve]==[c['loss'] for c in curve2]
    assert all(torch.equal(a, b) for a,b in zip(model.state_dict().values(), model2.state_dict().values()))
