"Training the generator: it learns, a killed run is the run, adapters come and go, nothing is trained that should not be."
import dataclasses, json, math, os, random, signal, subprocess, sys, time
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

from cmtrag.checkpoints import build_slots
from cmtrag.curriculum import curriculum, memory_lines
from cmtrag.generator import StreamGenerator, load_generator
from cmtrag.mamba import Mamba2LM, MambaConfig
from cmtrag.sft import (KINDS, SFT_DEFAULTS, SftError, Stage, TurnStream, adapt, check_adapted, encode_dialogue, last_checkpoint, load_recipe, lora_count, merge, move, new_model, plan_batches,
                        plan_logits, plan_losses, previous_plans, read_curve, save_generator, score_drafts, score_plans, structural_rows, train_generator, validation_loss)
from cmtrag.stream import LINK, MEMORY_TOKENS, READ, Layout, Scribe

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(hidden_size=32, num_hidden_layers=2, state_size=16, head_dim=16)

def data(single=80, short=30, long=6): return curriculum(1, 0, dict(single=single, short=short, long=long, ultra=1)).after
def scribe_for(made, at_least=4, **layout):
    texts = [s for ds in made.values() for d in ds for u in d.turns for s in (u.query, *(t.draft.sub_question for t in u.traces))]
    return Scribe(build_slots(texts, at_least=at_least, extra=MEMORY_TOKENS), Layout(**layout))

@pytest.fixture(scope='module')
def made(): return data()
@pytest.fixture(scope='module')
def scribe(made): return scribe_for(made, memory=True)
@pytest.fixture(scope='module')
def small(): return load_recipe('sft-small', model=TINY, tokens=40_000, every=8)

# --- a run that is killed ---

def one_run(folder):
    made = data(60, 20, 4)
    scribe = scribe_for(made)
    r = load_recipe('sft-small', model=TINY, tokens=60_000, every=6)
    train,dev = TurnStream(scribe, made, r),TurnStream(scribe, {k: v[:3] for k,v in made.items()}, r, moving=False)
    m,infos = train_generator(new_model(r, scribe.tok.vocab_size), r, train, dev, folder)
    save_generator(Path(folder)/'generator', m, scribe, half=False)
    print('resumed at', infos[0]['resumed_at'])

RUN = 'import sys; sys.path.insert(0, sys.argv[2]); from test_sft import one_run; one_run(sys.argv[1])'

def start(folder):
    env = {**os.environ, 'OMP_NUM_THREADS':'1', 'PYTHONPATH':str(ROOT)}
    return subprocess.Popen([sys.executable, '-c', RUN, str(folder), str(ROOT/'tests')], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

def test_a_killed_run_is_the_run(tmp_path):
    torn = start(tmp_path/'torn')
    work = tmp_path/'torn'/'phase-0'
    end = time.time()+400
    while not list(work.glob('checkpoint-*/complete')):
        assert torn.poll() is None and time.time()<end, torn.stdout.read()
        time.sleep(.02)
    torn.send_signal(signal.SIGKILL); torn.wait()
    assert not (work/'done.json').exists()
    (work/'checkpoint-999').mkdir()                                 # a checkpoint that was being written
    again = start(tmp_path/'torn')
    one_run(tmp_path/'whole')                                       # in this process, while the other goes on
    out,_ = again.communicate(timeout=400)
    assert again.returncode==0, out
    assert int(out.split('resumed at')[1].split()[0])>0
    a,b = ((tmp_path/n/'generator'/'model.safetensors').read_bytes() for n in ('whole','torn'))
    assert a==b
    steps = lambda n: [(r['step'], r.get('loss'), r.get('eval_loss')) for r in read_curve(tmp_path/n)]
    assert steps('whole')==steps('torn')

# --- it learns ---

def test_a_minute_of_training_learns(tmp_path):
    "On held-out single turns the loss falls below a quarter; half a plan's links and its first whole sub-questions come out of nothing."
    made = data(600, 40, 4)
    scribe = scribe_for(made, at_least=8)
    r = load_recipe('sft-small', model=dict(hidden_size=64, num_hidden_layers=2, state_size=32, head_dim=32), tokens=420_000, every=1000, batch_tokens=640, rate=8e-3, beta2=.99,
                    stages=dict(single=dict(mix=dict(single=1.), share=1., max_length=1024)))
    train,dev = (TurnStream(scribe, {'single': ds}, r, moving=m) for ds,m in ((made['single'][:-40], True), (made['single'][-40:], False)))
    model = new_model(r, scribe.tok.vocab_size)
    look = lambda: (validation_loss(model, dev)['loss'], score_plans(StreamGenerator(model, scribe, most=150), made['single'][-40:]))
    model.use('numba')
    before,none = look()
    model.use('torch')
    t = time.process_time()
    model,_ = train_generator(model, r, train, dev, tmp_path)
    spent = time.process_time()-t
    model.use('numba')
    after,some = look()
    print(f"loss {before:.2f} -> {after:.2f} in {spent:.0f} s of CPU; links within a turn {none['within']['f1']:.2f} -> {some['within']['f1']:.2f}, sub-questions {none['sub_question']:.2f} -> {some['sub_question']:.2f}")
    assert before>6 and after<before/4
    assert none['within']['f1']<.1 and some['within']['f1']>.3
    assert none['sub_question']==0 and some['sub_question']>.05

def test_a_rate_that_is_too_high_is_named(made, scribe, small, tmp_path):
    r = dataclasses.replace(small, rate=1e30, clip=1e30, warmup=0.)
    s = TurnStream(scribe, made, r, memory_lines)
    with pytest.raises(SftError, match=r'step \d+: the loss is (nan|inf)'): train_generator(new_model(r, scribe.tok.vocab_size), r, s, s, tmp_path)

# --- examples ---

def test_moving_is_encoding_again(made, scribe):
    rng = random.Random(3)
    for d in rng.sample(made['short'], 12)+made['long'][:3]:
        offset,seed = rng.randrange(256),rng.random()
        again = [i for t in scribe.conversation(d, offset, random.Random(seed), memory_lines) for i in t[0]]
        order = scribe.tok.start(random.Random(seed)).order
        assert move(scribe, offset, order)[encode_dialogue(scribe, d, lines=memory_lines)[0]].tolist()==again

def test_a_long_dialogue_loses_whole_turns(made, scribe):
    d = max(made['long'], key=lambda d: len(d.turns))
    whole = encode_dialogue(scribe, d, lines=memory_lines)
    q,end = scribe.tok.id('[Q]'),scribe.tok.id('[/PLAN]')
    for most in (len(whole[0])-1, len(whole[0])//2, 300):
        ids,kinds,cut,gone = encode_dialogue(scribe, d, most, memory_lines)
        assert cut>0 and len(ids)<=most and ids[0]==q and ids[-1]==end
        assert (ids==q).sum()==(ids==end).sum()==len(d.turns)-cut
        assert gone==0 or gone<=((whole[1]==LINK).sum())
    with pytest.raises(SftError, match='last turn alone'): encode_dialogue(scribe, d, 5)

def test_padding_is_never_in_the_loss(made, scribe, small):
    s = TurnStream(scribe, made, small, memory_lines)
    items = [('single', 0, 0), ('short', 0, 0), ('long', 0, 0)]
    b,m = s.batch(items),new_model(small, scribe.tok.vocab_size).eval()
    want = torch.cat([plan_losses(m, s.batch([i]))[0] for i in items])
    assert (plan_losses(m, b)[0]-want).abs().max()<1e-5
    for row,(k,i,_) in enumerate(items):
        ids,kinds = s.items[k][i]
        assert (b['targets'][row]!=-100).sum()==(kinds!=READ).sum() and (b['targets'][row,len(ids)-1:]==-100).all() and (b['weights'][row,len(ids)-1:]==0).all()

def test_batches_follow_from_the_seed(made, scribe, small):
    sizes = TurnStream(scribe, made, small, memory_lines).sizes()
    a = plan_batches(small, sizes)
    assert a==plan_batches(small, sizes)!=plan_batches(dataclasses.replace(small, seed=1), sizes)
    used = {}
    for b in a[0]:
        for k,i,u in b: used.setdefault((k.rstrip('-'), i), []).append(u)
    assert all(sorted(us)==list(range(len(us))) for us in used.values())        # never the same use twice
    share = {k: sum(sizes[x][i] for b in a[0] for x,i,_ in b if x.rstrip('-')==k) for k in KINDS}
    assert abs(share['single']/sum(share.values())-(.13+.022+.35*.15+.3*.15))<.03        # the stages' shares
    without = sum(sizes[k][i] for b in a[0] for k,i,_ in b if k[-1]=='-')
    assert abs(without/sum(share.values())-.3*.75)<.06                           # the last stage has exercises in a quarter of its examples
    with pytest.raises(SftError, match="kind 'long'"): plan_batches(small, dict(single=[9], short=[9]))

def test_the_papers_steps():
    r = load_recipe('sft-paper')
    b = plan_batches(r, dict(single=[9]*9653, short=[9]*3104, long=[9]*5045))
    assert [sum(map(len, p)) for p in b]==[3*9653, 3*3104, 3*(5045+1009)]        # Table 8
    replayed = {i for bs in b[2] for k,i,_ in bs if k=='short'}
    assert len(replayed)==1009

# --- adapters ---

def test_adapters_are_counted(scribe, small):
    big = MambaConfig(vocab_size=50288, hidden_size=2560, num_hidden_layers=64, state_size=128, head_dim=64)
    assert round(lora_count(big, 8)/1e6, 1)==10.7                                # Section B.3
    rows = structural_rows(scribe)
    assert len(rows)==7
    for rank,some in ((16, ()), (8, ()), (8, rows)):
        m = adapt(new_model(small, scribe.tok.vocab_size), Stage('x', rank=rank, alpha=2*rank), some)
        n = sum(p.numel() for p in m.parameters() if p.requires_grad)
        assert n==lora_count(m.get_base_model().config, rank, len(some))
        with pytest.raises(SftError, match='would be trained'): check_adapted(m, m.get_base_model().config, rank+1, len(some))

def test_only_adapters_and_rows_move(made, scribe, small, tmp_path):
    r = load_recipe('sft-paper', precision='fp32', new_rows=True, stages=dict(single=dict(mix=dict(single=1.), max_length=1024, rate=.01, epochs=1, batch=8)))
    s = TurnStream(scribe, made, r, memory_lines)
    m = new_model(small, scribe.tok.vocab_size)
    was = {k: v.clone() for k,v in m.state_dict().items()}
    tuned,_ = train_generator(m, r, s, s, tmp_path)
    now = tuned.state_dict()
    rows = structural_rows(scribe)
    moved = (now['backbone.embedding.weight']!=was['backbone.embedding.weight']).any(1).nonzero()[:,0].tolist()
    assert set(moved)<=set(rows) and len(moved)>4                                # the rows that occur
    assert torch.equal(now['lm_head.weight'], now['backbone.embedding.weight'])  # still tied
    for k in was:
        if 'proj' in k: assert not torch.equal(was[k], now[k])
        elif 'embedding' not in k and 'lm_head' not in k: assert torch.equal(was[k], now[k]), k
    save_generator(tmp_path/'g', tuned, scribe, half=False)
    code = f'from cmtrag.generator import load_generator; m = load_generator({str(tmp_path/"g")!r}, path="torch").model; print(m.backbone.embedding.weight[{rows[0]}].tolist())'
    out = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, 'PYTHONPATH':str(ROOT)}).stdout
    assert torch.allclose(torch.tensor(json.loads(out.strip().splitlines()[-1])), now['backbone.embedding.weight'][rows[0]])

def test_wrong_targets_fail_at_once(scribe, small, monkeypatch):
    import cmtrag.mamba as mamba
    monkeypatch.setattr(mamba, 'LORA_TARGETS', ('out_proj',))
    with pytest.raises(ValueError): adapt(new_model(small, scribe.tok.vocab_size), Stage('x'))

# --- scores ---

def test_scores(made):
    talks = made['short'][:10]+made['long'][:3]
    gold = [[[t.draft for t in u.traces] for u in d.turns] for d in talks]
    s = score_drafts(talks, gold)
    assert s['plan']==s['sub_question']==s['across']['f1']==1 and all(v['recall']==1 for v in (*s['by_distance'].values(), *s['by_kind'].values()))
    edges = [e for d in talks for t in d.traces for e in t.edges if e.cross_turn]
    assert sum(v['n'] for v in s['by_distance'].values())==sum(v['n'] for v in s['by_kind'].values())==len(edges)==s['across']['gold']
    none = [[[dataclasses.replace(t, sub_question='Which one?', keywords='', deps=()) for t in u] for u in d] for d in gold]
    s = score_drafts(talks, none)
    assert s['plan']==s['sub_question']==s['across']['f1']==s['across']['precision']==0
    at = {(i, t.id): (u.turn, first) for i,d in enumerate(talks) for u in d.turns for first in [u.traces[0].id] for t in u.traces}
    hits = sum(e.dep==at[i, t.id][1]-1 for i,d in enumerate(talks) for t in d.traces for e in t.edges if e.cross_turn)
    s = score_drafts(talks, previous_plans(talks))
    assert abs(s['across']['recall']-hits/len(edges))<1e-9 and s['within']['f1']==1

def test_a_generator_is_scored_alike_in_any_company(made, scribe, small, tmp_path):
    torch.manual_seed(1)
    g = StreamGenerator(new_model(small, scribe.tok.vocab_size).use('numba'), scribe, most=60)
    same = lambda s: {k: v for k,v in s.items() if 'second' not in k}
    a,b = (score_plans(g, made['short'][:6], batch=n) for n in (1, 5))
    assert same(a)==same(b) and a['invalid']==0 and a['tokens']>0
    save_generator(tmp_path/'g', g.model, scribe, half=False)
    h = load_generator(tmp_path/'g', most=60)
    assert h.scribe.layout==Layout(memory=True) and same(score_plans(h, made['short'][:6]))==same(a)

def test_recipes_refuse_what_cannot_be_meant():
    for kw,said in ((dict(lora=True), 'schedule'), (dict(precision='fp8'), 'precision'), (dict(tokens=0), 'tokens'), (dict(rate=0.), 'learning rate')):
        with pytest.raises(SftError, match=said): load_recipe('sft-small', **kw)
    with pytest.raises(ValueError, match='tokens'): load_recipe('sft-small', token=3)
    if not torch.cuda.is_available():
        from cmtrag.sft import _arguments
        r = load_recipe('sft-paper')
        with pytest.raises(SftError, match='needs a GPU'): _arguments(r, r.phases[0], 'x', 10)

def test_the_runs_parameters_are_those_of_the_notebook():
    src = [''.join(c['source']) for c in json.loads((ROOT/'nbs'/'43_sft.ipynb').read_text(encoding='utf-8'))['cells'] if 'parameters' in c['metadata'].get('tags', [])]
    got = {}
    exec(src[0], {}, got)
    assert got==SFT_DEFAULTS

def test_a_recipe_lies_over_its_base(tmp_path, monkeypatch):
    monkeypatch.setattr('cmtrag.profiles.params_folders', lambda: [tmp_path])
    (tmp_path/'two.yaml').write_text(json.dumps(dict(tokens=100, one_schedule=True, rate=.5, link=3., stages=dict(a=dict(mix=dict(single=1.), share=1.)))))
    (tmp_path/'one.yaml').write_text('base: two\nrate: 1.0')
    r = load_recipe('one')
    assert (r.rate, r.link, list(r.stages))==(1., 3., ['a'])
    (tmp_path/'two.yaml').write_text('base: one')
    with pytest.raises(ValueError, match='one.yaml: base leads back to itself: one → two → one'): load_recipe('one')
    (tmp_path/'two.yaml').unlink()
    with pytest.raises(ValueError, match='no parameter file two.yaml'): load_recipe('one')
