"The stateful Mamba-2: every way to compute it gives the same numbers, and the faults that libraries had are caught."
import json, os, random, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cmtrag import checkpoints as K, mamba as M
from cmtrag.traces import STRUCTURAL_TOKENS, TraceDraft, escape_control, parse_plan, serialise_plan

LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 257)
CPU = ('torch', 'numba')

def gap(a, b): return (a.detach().float()-b.detach().float()).abs().max().item()
def apart(a, b): return max(gap(a.conv, b.conv), gap(a.ssm, b.ssm))

def make(seed=0, **kw):
    "A tiny model with every kind of weight away from its initial value."
    torch.manual_seed(seed)
    m = M.Mamba2LM(M.MambaConfig(**dict(vocab_size=61, hidden_size=32, num_hidden_layers=3, state_size=16, head_dim=8) | kw)).eval()
    with torch.no_grad():
        for p in m.parameters():
            if p.dim()==1: p += .3*torch.randn(p.shape)
        m.backbone.embedding.weight *= 30
    return m

@pytest.fixture(scope='module', params=(1, 2), ids=('one group', 'two groups'))
def model(request): return make(n_groups=request.param)

@pytest.fixture(scope='module')
def ids(): return torch.randint(61, (1, 600), generator=torch.Generator().manual_seed(1))

def cuts(l): return sorted({c for c in (1, 2, 3, 4, l//2, l-3, l-1) if 0<c<l})

# ---- one function, many ways -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('path', CPU)
@pytest.mark.parametrize('l', LENGTHS)
def test_split_anywhere(model, ids, path, l):
    "257 tokens, or fewer, read in parts on a carried state = one long forward."
    model.use(path)
    want = model(ids[:,:l]).logits[0]
    assert want.abs().max()>1
    whole,end = model.prefill(ids[:,:l], every=True)
    assert gap(whole[0], want)<1e-4
    for c in cuts(l):
        a,s = model.prefill(ids[:,:c], every=True)
        b,s = model.prefill(ids[:,c:l], state=s, every=True)
        assert gap(torch.cat([a[0], b[0]]), want)<1e-4 and apart(s, end)<1e-4 and s.tokens==(l,)

@pytest.mark.parametrize('path', CPU)
@pytest.mark.parametrize('l', LENGTHS)
def test_a_part_of_any_length_after_any_other(model, ids, path, l):
    model.use(path)
    want = model(ids[:,:70+l+5]).logits[0]
    _,s = model.prefill(ids[:,:70])
    a,s = model.prefill(ids[:,70:70+l], state=s, every=True)
    b,_ = model.prefill(ids[:,70+l:70+l+5], state=s, every=True)
    assert gap(torch.cat([a[0], b[0]]), want[70:])<1e-4

def test_steps_numpy_and_numba_agree_with_the_forward(model, ids):
    want,out,end = model(ids[:,:257]).logits[0],{},{}
    for path in ('torch', 'numpy', 'numba'):
        d = model.use(path).decoder(model.start())
        out[path],end[path] = torch.cat([d.step(ids[0,t:t+1]) for t in range(257)]),d.state()
    assert all(gap(o, want)<1e-4 for o in out.values()), {k:gap(o, want) for k,o in out.items()}
    assert all(apart(e, end['torch'])<1e-4 for e in end.values())

@pytest.mark.parametrize('path', CPU)
def test_random_partitions(model, ids, path):
    model.use(path)
    want,rng = model(ids[:,:200]).logits[0],random.Random(5)
    for _ in range(10):
        s,at,got = None,0,[]
        while at<200:
            n = min(rng.choice((1, 1, 2, 3, 5, 17, 64, 90)), 200-at)
            if n==1 and s is not None and rng.random()<.5: lg,s = model.step([int(ids[0,at])], s)
            else: lg,s = model.prefill(ids[:,at:at+n], state=s)
            at += n
            got.append(gap(lg[0], want[at-1]))
        assert max(got)<1e-4 and s.tokens==(200,)

@pytest.mark.parametrize('chunk', (1, 3, 16, 256))
def test_the_chunk_length_is_a_matter_of_speed(model, ids, chunk):
    want = model.use('torch')(ids[:,:130]).logits
    old,model.config.chunk_size = model.config.chunk_size,chunk
    try: assert gap(model(ids[:,:130]).logits, want)<1e-4
    finally: model.config.chunk_size = old

def test_gradients_are_those_of_the_plain_recurrence(ids):
    m = make(2)
    def grads(ops):
        m.zero_grad()
        m.engine.ops = ops
        m(input_ids=ids[:,:100], labels=ids[:,:100]).loss.backward()
        return {n:p.grad.clone() for n,p in m.named_parameters()}
    slow = M.SimpleNamespace(conv=M.causal_conv, scan=lambda x,dt,A,B,C,h,chunk,final: M.scan_steps(x, dt, A, B, C, x.new_zeros(len(x), x.shape[2], x.shape[3], B.shape[-1]) if h is None else h))
    m.config.chunk_size = 32
    a,b = grads(slow),grads(M.TORCH_OPS)
    assert all(gap(a[k], b[k])<1e-4*max(1, a[k].abs().max().item()) for k in a) and all(g.abs().max()>0 for g in a.values())

def test_gradient_checkpointing_changes_nothing(ids):
    g = []
    for on in (False, True):
        m = make(2).train()
        if on: m.gradient_checkpointing_enable()
        m(input_ids=ids[:,:50], labels=ids[:,:50]).loss.backward()
        g.append({n:p.grad for n,p in m.named_parameters()})
    assert all(gap(g[0][k], g[1][k])<1e-6 for k in g[0])

@pytest.mark.parametrize('l', LENGTHS)
def test_hf_with_the_same_weights(ids, l):
    m = make(4, n_groups=2)
    hf = M.as_hf(m)
    with torch.no_grad(): want = hf(ids[:,:l]).logits[0]
    for path in CPU: assert gap(m.use(path).prefill(ids[:,:l], every=True)[0][0], want)<1e-4

# ---- batches -----------------------------------------------------------------------------------------------------------------

ROWS = [1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 33, 40, 63, 64, 65, 90]

@pytest.mark.parametrize('path,tol', [('torch', 1e-5), ('numba', 0)])
def test_sixteen_unequal_rows_are_each_alone(model, ids, path, tol):
    "Logits and next states, from the zero state and from carried ones; exactly so on the numba path."
    model.use(path)
    rows = [ids[0,10*i:10*i+n].tolist() for i,n in enumerate(ROWS)]
    more = [ids[0,300+3*i:300+3*i+n].tolist() for i,n in enumerate(reversed(ROWS))]
    lg,s = model.prefill(rows)
    lg2,s2 = model.prefill(more, state=s)
    d = model.decoder(s2)
    lg3 = d.step(list(range(16))); s3 = d.state()
    for i in range(16):
        a,t = model.prefill([rows[i]])
        b,t2 = model.prefill([more[i]], state=t)
        c,t3 = model.step([i], t2)
        assert gap(lg[i], a[0])<=tol and gap(lg2[i], b[0])<=tol and gap(lg3[i], c[0])<=tol
        assert apart(s[i], t)<=tol and apart(s2[i], t2)<=tol and apart(s3[i], t3)<=tol
        assert s3[i].tokens==t3.tokens==(len(rows[i])+len(more[i])+1,)

@pytest.mark.parametrize('path', ('torch', 'numpy', 'numba'))
def test_rows_that_are_not_stepped_stay(model, ids, path):
    model.use(path)
    _,s = model.prefill([ids[0,:9].tolist(), ids[0,9:30].tolist(), [4]])
    d = model.decoder(s)
    lg = d.step([7, 8], [2, 0])
    e = d.state()
    assert apart(e[1], s[1])==0 and e.tokens==(10, 21, 2)
    assert gap(lg[0], model.step([7], s[2])[0][0])<1e-5 and gap(lg[1], model.step([8], s[0])[0][0])<1e-5

def test_a_batch_with_pads_read_as_tokens_would_be_seen(model, ids):
    model.use('torch')
    rows = [ids[0,:3].tolist(), ids[0,:9].tolist()]
    _,good = model.prefill(rows)
    _,bad = model.prefill(M.pack_ids(rows)[0])            # the lengths left out: three tokens and six pads
    _,alone = model.prefill([rows[0]])
    assert apart(good[0], alone)<1e-5<.01<apart(bad[0], alone)

def test_states_pack_and_unpack(model, ids):
    model.use('numba')
    ss = [model.prefill(ids[:,:n])[1] for n in (3, 20, 8)]
    p = M.MambaState.cat(ss)
    assert p.tokens==(3, 20, 8) and all(apart(p[i], ss[i])==0 for i in range(3)) and p[[2,0]].tokens==(8, 3)
    assert p.nbytes==3*ss[0].nbytes

@pytest.mark.parametrize('side', ('left', 'right'))
def test_training_masks(model, ids, side):
    model.use('torch')
    want = model(ids[:,:6]).logits[0]
    row,mask = torch.full((2, 10), 9),torch.zeros(2, 10, dtype=torch.long)
    at = slice(4, 10) if side=='left' else slice(0, 6)
    row[:,at],mask[0,at],mask[1] = ids[0,:6],1,1
    assert gap(model(row, attention_mask=mask).logits[0,at], want)<1e-5
    with pytest.raises(M.MambaError, match='holes'): model(row, attention_mask=torch.tensor([[1,0,1]+[1]*7]*2))

# ---- the state is a value ----------------------------------------------------------------------------------------------------

def untouched(use, s):
    "Does `use(s)` leave `s` as it was? By value and by torch's count of writes."
    before,v = (s.conv.clone(), s.ssm.clone()),(s.conv._version, s.ssm._version)
    use(s)
    return torch.equal(before[0], s.conv) and torch.equal(before[1], s.ssm) and v==(s.conv._version, s.ssm._version)

@pytest.mark.parametrize('path', ('torch', 'numpy', 'numba'))
def test_a_state_can_be_used_twice(model, ids, path):
    model.use(path)
    _,s = model.prefill(ids[:,:30])
    for use in (lambda s: model.prefill(ids[:,30:50], state=s), lambda s: model.step([5], s), lambda s: model.greedy([[1,2]], s, most=5)): assert untouched(use, s)
    a,b = model.greedy([[1,2]], s, most=12),model.greedy([[1,2]], s, most=12)
    assert a[0]==b[0] and apart(a[1], b[1])==0
    d,e = model.decoder(s),model.decoder(s)               # two branches, interleaved
    x = [(d.step([i]), e.step([60-i])) for i in range(5)]
    alone = model.decoder(s)
    assert all(torch.equal(p, alone.step([i])) for i,(p,_) in enumerate(x))
    kept = d.state()
    d.step([3])
    assert kept.tokens==(35,) and untouched(lambda _: d.step([3]), kept)

def test_a_cache_that_is_written_to_would_be_seen(model, ids):
    class Writes(M.TorchDecoder):
        def __init__(self, path, s): self.m,self.conv,self.ssm,self.tokens = path.model,s.conv,s.ssm,list(s.tokens)
    model.use('torch')
    _,s = model.prefill(ids[:,:30])
    assert not untouched(lambda s: Writes(model.engine, s).step([5]), s)

def test_interleaved_conversations(model, ids):
    model.use('numba')
    A,B = [[ids[0,i:i+7].tolist()] for i in (0, 50)],[[ids[0,i:i+9].tolist()] for i in (100, 150)]
    def talk(turns):
        s,out = None,[]
        for t in turns: (w,s) = model.greedy(t, s, most=6); out.append(w)
        return out
    a1,sa = model.greedy(A[0], most=6); b1,sb = model.greedy(B[0], most=6)
    a2,_ = model.greedy(A[1], sa, most=6); b2,_ = model.greedy(B[1], sb, most=6)
    assert [a1,a2]==talk(A) and [b1,b2]==talk(B)

CONTINUE = '''
import sys, json, torch
from cmtrag.mamba import load_mamba, load_state
m = load_mamba(sys.argv[1], 'numba')
w,s = m.greedy([[4,5,6]], load_state(open(sys.argv[2], 'rb').read()), most=20)
print(json.dumps([w, s.tokens, s.ssm.double().sum().item()]))
'''
def test_saved_and_continued_in_a_new_process(ids, tmp_path):
    make(6).save_pretrained(tmp_path/'m')
    m = M.load_mamba(tmp_path/'m', 'numba')
    _,s = m.prefill(ids[:,:77])
    (tmp_path/'s').write_bytes(s.dump())
    w,e = m.greedy([[4,5,6]], s, most=20)
    p = subprocess.run([sys.executable, '-c', CONTINUE, tmp_path/'m', tmp_path/'s'], capture_output=True, text=True, check=True)
    assert json.loads(p.stdout.splitlines()[-1])==[w, list(e.tokens), e.ssm.double().sum().item()]

def test_the_size_of_a_state_does_not_depend_on_what_it_has_seen(model, ids):
    model.use('numba')
    sizes,s = set(),None
    for _ in range(4):
        _,s = model.greedy(ids[:,:100].tolist(), s, most=10)
        sizes.add((s.nbytes, s.conv.shape, s.ssm.shape))
    assert len(sizes)==1 and s.tokens==(440,)

@pytest.mark.parametrize('kw', [dict(num_hidden_layers=2), dict(state_size=8), dict(hidden_size=64)])
def test_a_state_of_another_model_is_refused(model, ids, kw):
    s = make(**kw).start()
    for use in (lambda: model.prefill(ids[:,:3], state=s), lambda: model.step([1], s), lambda: model.decoder(s)):
        with pytest.raises(M.MambaError, match='this model with 1 rows needs'): use()
    with pytest.raises(M.MambaError, match='2 rows'): model.prefill([[1],[2]], state=model.start(1))

# ---- paths -------------------------------------------------------------------------------------------------------------------

def broken(change):
    class Bad(M.TorchPath):
        name = 'bad'
        def prefill(self, ids, n, s, every): return change(super().prefill, ids, n, s, every)
    return Bad

FAULTS = dict(
    state_starts_from_zeros = lambda f,ids,n,s,e: f(ids, n, M.MambaState(s.conv, s.ssm*0, s.tokens), e),
    conv_starts_from_zeros  = lambda f,ids,n,s,e: f(ids, n, M.MambaState(s.conv*0, s.ssm, s.tokens), e),
    pads_enter_the_state    = lambda f,ids,n,s,e: f(ids, n*0+ids.shape[1], s, e),
    rows_share_a_state      = lambda f,ids,n,s,e: f(ids, n, s[[0]*len(s)], e),
    conv_one_too_old        = lambda f,ids,n,s,e: f(ids, n, M.MambaState(s.conv.roll(1, -1), s.ssm, s.tokens), e),
    not_a_number            = lambda f,ids,n,s,e: tuple(x*float('nan') if isinstance(x, torch.Tensor) else x for x in f(ids, n, s, e)))

@pytest.mark.parametrize('fault', FAULTS)
def test_a_wrong_path_is_named_with_its_deviation(model, fault):
    with pytest.raises(M.MambaError, match=r"path 'bad' failed its self-test.*differ by ([\d.e+-]+|nan) of the largest logit, allowed 0.0001"):
        M.self_test(model, broken(FAULTS[fault])(model))

def test_a_path_that_fails_is_not_used(model, monkeypatch):
    model.use('torch')
    Bad = broken(FAULTS['conv_starts_from_zeros'])
    monkeypatch.setitem(M.PATHS, 'bad', Bad)
    with pytest.raises(M.MambaError, match="path 'bad'"): model.use('bad')
    assert model.path=='torch'
    with pytest.raises(M.MambaError, match='allowed: torch, numpy, numba, cuda'): model.use('gpu')

@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU is here')
def test_cuda_says_what_is_missing(model):
    with pytest.raises(M.MambaError, match='needs a GPU'): model.use('cuda')

def test_cuda_kernels_missing(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setitem(sys.modules, 'causal_conv1d', None)
    with pytest.raises(M.MambaError, match=r'pip install "cmtrag\[gpu\]"'): M.cuda_ops()

def conv_update(x, conv_state, weight, bias=None, activation=None):
    "What `causal_conv1d_update` promises: the carried inputs are moved on in place."
    assert x.shape==conv_state.shape[:2] and weight.shape==(x.shape[1], 4) and activation=='silu'
    win = torch.cat([conv_state, x[...,None]], -1)
    conv_state.copy_(win[...,1:])
    return torch.nn.functional.silu((win*weight).sum(-1)+bias)

def state_update(state, x, dt, A, B, C, D, z=None, dt_bias=None, dt_softplus=False):
    "What `selective_state_update` promises, with its checks on shapes and strides."
    b,h,p,n = state.shape
    assert x.shape==dt.shape==(b,h,p) and A.shape==(h,p,n) and B.shape==C.shape and B.shape[::2]==(b,n) and D.shape==dt_bias.shape==(h,p) and dt_softplus
    assert A.stride(-1)==A.stride(-2)==dt.stride(-1)==dt_bias.stride(-1)==0       # one value per head: the fast branch
    dt,(B,C) = torch.nn.functional.softplus(dt+dt_bias)[...,None],(t.repeat_interleave(h//t.shape[1], 1)[:,:,None] for t in (B,C))
    state.copy_(state*(dt*A).exp()+dt*B*x[...,None])
    return (state*C).sum(-1)+D*x

@pytest.fixture
def like_cuda(monkeypatch):
    "The `cuda` path on the CPU: the kernels replaced by what they promise, a replay by a run. Its own logic is what is tested."
    ops = M.SimpleNamespace(conv=M.causal_conv, scan=M.scan_chunks, conv_step=conv_update, scan_step=state_update)
    def capture(self): self.replay = lambda: setattr(self, 'logits', self.run())
    monkeypatch.setattr(M, 'cuda_ops', lambda: ops)
    monkeypatch.setattr(M.CudaGraph, 'capture', capture)
    monkeypatch.setattr(M.CudaGraph, 'run', torch.no_grad()(M.CudaGraph.run))

def test_the_logic_of_the_cuda_path(model, ids, like_cuda):
    rows = [ids[0,30*i:30*i+n].tolist() for i,n in enumerate((5, 40, 1, 17))]
    free,_ = model.use('torch').greedy(rows, most=25)
    stop = {free[0][3], free[1][9]}
    want,end = model.greedy(rows, stop=stop, most=25)
    got,e = model.use('cuda').greedy(rows, stop=stop, most=25)
    assert model.path=='cuda' and want==got and apart(end, e)<1e-4 and end.tokens==e.tokens
    assert len({len(w) for w in want})>1                              # rows that had finished stayed as they were
    _,s = model.prefill(rows)
    assert untouched(lambda s: model.greedy(rows, s, most=5), s)
    d,other = model.decoder(s),model.decoder(s)
    assert len(model.engine.graphs[16].ids)==16                       # four conversations, packed into sixteen rows
    with pytest.raises(M.MambaError, match='taken over by a newer decoder'): d.step([1, 2, 3, 4])
    a,b = other.step([1], [2]),other.state()
    assert gap(a[0], model.use('torch').step([1], s[2])[0][0])<1e-5 and apart(b[[0,1,3]], s[[0,1,3]])==0

def test_compiled_code_is_not_given_what_does_not_exist(model):
    d = model.use('numba').decoder(model.start(2))
    for bad in (([61, 0], None), ([-1, 0], None), ([1], [2]), ([1, 2], [0, 0]), ([1], None)):
        with pytest.raises(M.MambaError): d.step(*bad)
    with pytest.raises(M.MambaError): model.greedy([[61]])
    with pytest.raises(M.MambaError): model.greedy([[]])
    assert model.greedy([[1]], most=0)[0]==[[]] and model.use('torch').greedy([[1]], most=0)[0]==[[]]

def test_greedy_is_the_same_on_all_paths_and_is_hf_s(ids):
    m = make(8)
    rows = [ids[0,:5].tolist(), ids[0,20:60].tolist(), [3]]
    free,_ = m.greedy(rows, most=25)
    out = {p:m.use(p).greedy(rows, stop={free[0][3], free[1][9]}, most=25) for p in ('torch', 'numpy', 'numba')}
    assert len({len(w) for w in out['numba'][0]})>1
    assert out['torch'][0]==out['numpy'][0]==out['numba'][0]
    assert max(apart(out['torch'][1], out[p][1]) for p in out)<1e-4
    hf = M.as_hf(m).generate(torch.tensor([rows[1]]), max_new_tokens=25, do_sample=False, pad_token_id=0)[0,40:].tolist()
    assert hf==m.greedy([rows[1]], most=25)[0][0]

def test_changed_weights_are_noticed_by_the_compiled_path(ids):
    m = make(9).use('numba')
    a = m.prefill(ids[:,:5])[0]
    with torch.no_grad(): m.backbone.layers[0].mixer.in_proj.weight.data.add_(.1*torch.randn_like(m.backbone.layers[0].mixer.in_proj.weight))
    b = m.prefill(ids[:,:5])[0]
    assert gap(a, b)>1e-2 and gap(b, m.use('torch').prefill(ids[:,:5])[0])<1e-4

# ---- checkpoints -------------------------------------------------------------------------------------------------------------

SS = dict(d_model=32, d_intermediate=0, n_layer=3, vocab_size=57, ssm_cfg=dict(layer='Mamba2', d_state=16, headdim=8), attn_layer_idx=[], attn_cfg={},
          rms_norm=True, residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=16, tie_embeddings=True)

def published(folder, seed=0, **change):
    "A folder in the layout of state-spaces, with tensors made by name and size alone."
    folder.mkdir(exist_ok=True)
    cfg = SS | change
    (folder/'config.json').write_text(json.dumps(cfg), encoding='utf-8')
    g,H = torch.Generator().manual_seed(seed),2*cfg['d_model']//cfg['ssm_cfg']['headdim']
    d,I,N,V = cfg['d_model'],2*cfg['d_model'],cfg['ssm_cfg']['d_state'],-(-cfg['vocab_size']//16)*16
    r = lambda *s: torch.randn(*s, generator=g)
    w = {'backbone.embedding.weight':r(V, d)}
    for l in range(cfg['n_layer']):
        p = f'backbone.layers.{l}.mixer.'
        w |= {p+'dt_bias':r(H)-2, p+'A_log':r(H), p+'D':r(H), p+'in_proj.weight':r(2*I+2*N+H, d)/d**.5, p+'conv1d.weight':r(I+2*N, 1, 4)/2, p+'conv1d.bias':r(I+2*N)/2,
              p+'norm.weight':1+r(I)/3, p+'out_proj.weight':r(d, I)/I**.5, f'backbone.layers.{l}.norm.weight':1+r(d)/3}
    w |= {'backbone.norm_f.weight':1+r(d)/3}
    w['lm_head.weight'] = w['backbone.embedding.weight'] if cfg['tie_embeddings'] else r(V, d)
    torch.save(w, folder/'pytorch_model.bin')
    return w

def independent(w, ids, layers, H, N):
    "A step-by-step Mamba-2 in float64, written from the paper's equations; knows nothing of the package."
    w = {k:v.double() for k,v in w.items()}
    rms = lambda x,g: x/torch.sqrt((x**2).mean()+1e-5)*g
    win,state,out = [[torch.zeros_like(w['backbone.layers.0.mixer.conv1d.bias'])]*4 for _ in range(layers)],{},[]
    for i in ids:
        x = w['backbone.embedding.weight'][i]
        for l in range(layers):
            m = {k.split('mixer.')[1]:v for k,v in w.items() if k.startswith(f'backbone.layers.{l}.mixer.')}
            u = m['in_proj.weight']@rms(x, w[f'backbone.layers.{l}.norm.weight'])
            I = m['norm.weight'].numel()
            z,xbc,dt = u[:I],u[I:I+I+2*N],u[2*I+2*N:]
            win[l] = win[l][1:]+[xbc]
            c = sum(m['conv1d.weight'][:,0,j]*win[l][j] for j in range(4))+m['conv1d.bias']
            c = c*torch.sigmoid(c)
            dt,B,C,ys = torch.log(1+torch.exp(dt+m['dt_bias'])),c[I:I+N],c[I+N:],[]
            for h in range(H):
                v = c[h*I//H:(h+1)*I//H]
                s = state.get((l,h), torch.zeros(I//H, N, dtype=torch.double))*torch.exp(-dt[h]*torch.exp(m['A_log'][h]))+dt[h]*torch.outer(v, B)
                state[l,h] = s
                ys.append(s@C+m['D'][h]*v)
            x = x+m['out_proj.weight']@rms(torch.cat(ys)*z*torch.sigmoid(z), m['norm.weight'])
        out.append(w['lm_head.weight']@rms(x, w['backbone.norm_f.weight']))
    return torch.stack(out)

@pytest.mark.parametrize('tied', (True, False))
def test_a_state_spaces_checkpoint(ids, tmp_path, tied):
    w = published(tmp_path/'m', tie_embeddings=tied)
    want = independent(w, ids[0,:70].tolist(), 3, 8, 16)
    for path in CPU:
        m = M.load_mamba(tmp_path/'m', path)
        assert m.config.vocab_size==64 and m.path==path
        assert gap(m(ids[:,:70]).logits[0], want)<1e-4
        a,s = m.prefill(ids[:,:33], every=True)
        b,_ = m.prefill(ids[:,33:70], state=s, every=True)
        assert gap(torch.cat([a[0], b[0]]), want)<1e-4
    assert sorted(p.name for p in (tmp_path/'m').iterdir())==['config.json', 'pytorch_model.bin', 'pytorch_model.safetensors']

@pytest.mark.parametrize('field,change', [('attn_layer_idx', dict(attn_layer_idx=[1])), ('attn_cfg', dict(attn_cfg=dict(num_heads=2))), ('d_intermediate', dict(d_intermediate=64)),
    ('rms_norm', dict(rms_norm=False)), ('ssm_cfg: layer', dict(ssm_cfg=dict(layer='Mamba1'))), ('ssm_cfg: rmsnorm', dict(ssm_cfg=dict(layer='Mamba2', rmsnorm=False))),
    ('ssm_cfg: bias', dict(ssm_cfg=dict(layer='Mamba2', bias=True))), ('ssm_cfg: d_ssm', dict(ssm_cfg=dict(layer='Mamba2', d_ssm=32))), ('n_groups = 3', dict(ssm_cfg=dict(layer='Mamba2', headdim=8, ngroups=3)))])
def test_what_cannot_be_represented_is_named(tmp_path, field, change):
    (tmp_path/'config.json').write_text(json.dumps(SS|change), encoding='utf-8')
    with pytest.raises(K.CheckpointError, match=field): M.load_mamba(tmp_path)

def test_hf_folders_in_shards(ids, tmp_path):
    m = make(3)
    hf = M.as_hf(m)
    hf.save_pretrained(tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('model-*.safetensors')))>1
    with torch.no_grad(): assert gap(M.load_mamba(tmp_path, 'numba')(ids).logits, hf(ids).logits)<1e-4

@pytest.mark.parametrize('tied', (True, False))
def test_our_own_folders(ids, tmp_path, tied):
    m = make(tie_word_embeddings=tied)
    m.save_pretrained(tmp_path)
    for n in (M.Mamba2LM.from_pretrained(tmp_path).eval(), M.load_mamba(tmp_path)):
        with torch.no_grad(): assert torch.equal(n(ids).logits, m(ids).logits)
        assert (n.lm_head.weight is n.backbone.embedding.weight)==tied and n.use('numba').deviation<1e-5

def test_structural_tokens_have_rows_in_the_padded_vocabulary():
    s = K.from_state_spaces(dict(d_model=2560, n_layer=64, vocab_size=50277, ssm_cfg=dict(layer='Mamba2'), pad_vocab_size_multiple=16))
    assert s['vocab_size']-50277>=len(STRUCTURAL_TOKENS)

@pytest.mark.skipif('CMTRAG_DATA' not in os.environ, reason='CMTRAG_DATA is not set')
def test_the_real_tokenizer():
    t = K.load_tokenizer(Path(os.environ['CMTRAG_DATA'])/'tokenizer'/'20B_tokenizer.json')
    assert [t.new[k] for k in STRUCTURAL_TOKENS]==list(range(50277, 50284)) and t.vocab_size<=50288
    plan = serialise_plan([TraceDraft('Who founded NBC in São Paulo?', 'NBC founder'), TraceDraft("Where was [A_1]'s wife born?", 'born', (1,))])
    ids,_ = t.encode(plan)
    assert parse_plan(t.decode(ids))==parse_plan(plan) and ids.count(t.new['[TRACE]'])==2
    assert t.encode('born? '+'[PLAN]')==t.encode('born?'+' [PLAN]')==t.encode('born?[PLAN]')

def small_neox(folder):
    "A stand-in with the mechanics of the GPT-NeoX tokenizer: bytes, and two special tokens."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    t = Tokenizer(models.BPE(vocab={c:i for i,c in enumerate(['<|endoftext|>', '<|padding|>', *sorted(pre_tokenizers.ByteLevel.alphabet())])}, merges=[]))
    t.pre_tokenizer,t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False),decoders.ByteLevel()
    t.add_special_tokens(['<|endoftext|>', '<|padding|>'])
    t.save(str(folder/'tokenizer.json'))
    return folder

@pytest.fixture(params=('stand-in', 'real'))
def neox(request, tmp_path):
    if request.param=='stand-in': return K.load_tokenizer(small_neox(tmp_path))
    if 'CMTRAG_DATA' not in os.environ: pytest.skip('CMTRAG_DATA is not set')
    return K.load_tokenizer(Path(os.environ['CMTRAG_DATA'])/'tokenizer'/'20B_tokenizer.json')

@pytest.mark.parametrize('text', ['<|endoftext|>', 'a <|endoftext|> b', 'a<|padding|><|endoftext|>b', 'x [PLAN] <|endoftext|>', '<<|endoftext|>|>'])
def test_a_user_cannot_write_special_tokens(neox, text):
    ids,_ = neox.encode(escape_control(text))
    special = {i for i,t in neox.tok.get_added_tokens_decoder().items() if t.special}
    assert special=={neox.id('<|endoftext|>'), neox.id('<|padding|>')}
    assert not set(ids)&(special|set(neox.new.values())) and neox.decode(ids)==escape_control(text)
    live,_ = neox.encode(text)                            # the seven stay what they are
    assert live.count(neox.new['[PLAN]'])==text.count('[PLAN]') and not special&set(live)

@pytest.mark.parametrize('text', ['\ud800', 'a\udfff b', '\ud83d\ude00', '[PLAN]\ud800'])
def test_half_a_surrogate_pair_is_replaced(neox, text):
    ids,_ = neox.encode(text)
    assert '\ufffd' in neox.decode(ids) and neox.decode(ids).encode()

# ---- damaged folders ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('b', [b'', b'[]', b'null', b'5', b'"x"', b'{', b'{"a":"\xff"}', b'\x00'*9, b'['*100_000])
def test_damaged_json_names_its_file(tmp_path, b):
    for name,read in (('config.json', lambda: K.read_shape(tmp_path)), ('slot_tokenizer.json', lambda: K.load_tokenizer(tmp_path))):
        (tmp_path/name).write_bytes(b)
        with pytest.raises(K.CheckpointError, match=f'^{name}: '): read()

@pytest.mark.parametrize('change', [dict(vocab_size='57'), dict(vocab_size=None), dict(pad_vocab_size_multiple=0), dict(d_model=True), dict(n_layer=2.), dict(ssm_cfg='x'), dict(tie_embeddings='no'),
                                    dict(residual_in_fp32=None), dict(ssm_cfg=dict(layer='Mamba2', d_conv='4'))])
def test_configurations_with_wrong_types(tmp_path, change):
    (tmp_path/'config.json').write_text(json.dumps(SS|change), encoding='utf-8')
    with pytest.raises(K.CheckpointError, match='^config.json: .*must be'): K.read_shape(tmp_path)

@pytest.mark.parametrize('cut', [0, 4, 50, -1])
def test_damaged_weights_name_their_file(tmp_path, cut):
    make().save_pretrained(tmp_path)
    f = tmp_path/'model.safetensors'
    f.write_bytes(f.read_bytes()[:cut])
    with pytest.raises(K.CheckpointError, match='^model.safetensors: empty, cut off'): K.read_tensors(tmp_path, K.read_shape(tmp_path))

def test_a_damaged_conversion_is_named(tmp_path):
    published(tmp_path/'m')
    (tmp_path/'m'/'pytorch_model.safetensors').write_bytes(b'')
    with pytest.raises(K.CheckpointError, match='^pytorch_model.safetensors: empty, cut off'): K.convert_bin(tmp_path/'m'/'pytorch_model.bin')

WORDS = dict(words=['is', 'that'], ids=4, slots=3, extra=['[Q]'])
@pytest.mark.parametrize('field,change', [('words', dict(words=3)), ('words', dict(words=['a', None])), ('words', dict(words=['is', 'is'])), ('words', dict(words=['a b'])), ('words', dict(words=[''])),
    ('ids', dict(ids=True)), ('ids', dict(ids=1)), ('ids', dict(ids=2.)), ('ids', dict(ids=None)), ('slots', dict(slots=False)), ('slots', dict(slots=0)), ('slots', dict(slots='3')),
    ('extra', dict(extra='[Q]')), ('extra', dict(extra=[1])), ('extra', dict(extra=['[S_0]'])), ("'more'", dict(more=1)), ('embedding of 900 rows', dict(slots=10**15))])
def test_damaged_slot_vocabularies(tmp_path, field, change):
    (tmp_path/'slot_tokenizer.json').write_text(json.dumps(WORDS), encoding='utf-8')
    assert K.load_tokenizer(tmp_path, 900).vocab_size<900
    (tmp_path/'slot_tokenizer.json').write_text(json.dumps(WORDS|change), encoding='utf-8')
    with pytest.raises(K.CheckpointError, match=f'^slot_tokenizer.json: .*{field}'): K.load_tokenizer(tmp_path, 900)

def test_tokenizer_folders_say_what_is_missing(tmp_path):
    with pytest.raises(K.CheckpointError, match='neither slot_tokenizer.json .* nor tokenizer.json'): K.load_tokenizer(tmp_path)
    (tmp_path/'tokenizer.json').write_bytes(b'{}')
    with pytest.raises(K.CheckpointError, match='^tokenizer.json: cannot be read'): K.load_tokenizer(tmp_path)
    with pytest.raises(K.CheckpointError, match='^tokenizer.json: 265 tokens do not fit into an embedding of 264 rows'): K.load_tokenizer(small_neox(tmp_path), 264)

# ---- slots -------------------------------------------------------------------------------------------------------------------

def test_slots_run_out_and_the_oldest_word_goes():
    t = K.SlotTokenizer(['is', 'that'], ids=4, slots=3)
    s,seen = t.start(),[]
    for w in ('Ba', 'Be', 'Bi', 'Ba', 'Bo', 'Bu'):
        ids,s = t.encode(f'is {w}', s)
        seen.append(ids[1]-t.first_slot)
    assert seen==[0, 1, 2, 0, 1, 2] and s.evicted==2 and s.lost==0     # Bo takes Be's, Bu takes Bi's; Ba was used again in between
    ids,s = t.encode('Ca Ce Ci Co', s)
    assert ids[-1]==t.unk and s.lost==1 and t.decode(ids, s)=='Ca Ce Ci [UNK]'

def test_a_word_the_model_still_uses_keeps_its_slot():
    t = K.SlotTokenizer([], slots=2)
    ids,s = t.encode('Ba Be', t.start())
    for table,gone in ((s, 'Ba'), (t.touch(ids[:1], s), 'Be')): assert gone not in t.encode('Bo', table)[1].words

@pytest.mark.parametrize('names', [False, True])
def test_slot_text_round_trips(names):
    rng,t = random.Random(3),K.SlotTokenizer(['Who', 'is', 'the', 'of', 'a'], ids=40, slots=64, names=names)
    parts = ['Who', 'is', 'the', 'of', 'The', 'Bay', 'Bay of Zed', 'Zed', "O'Neil", 'x-y', '?', ',', '.', '(', ')', "'s", '[A_3]', '[A_40]', '"', '-', '3', '%', '[', ']', '\\', 'é', '—', '[PLA', "'"]
    for _ in range(500):
        s = ''.join(rng.choice(parts)+rng.choice(('', ' ')) for _ in range(rng.randint(1, 14))).strip()
        ids,table = t.encode(s, t.start())
        assert t.decode(ids, table)==s, s
        assert all(0<=i<t.vocab_size for i in ids)
        again,after = t.encode(s, table, new=False)                             # what the table holds is enough to write it again
        assert after.words==table.words and t.decode(again, table)==s and K.SlotTable.load(table.dump())==table

def test_a_name_is_one_slot_wherever_it_stands():
    t = K.SlotTokenizer(['who', 'founded', 'the', 'of', 'in', 'is', 'and', 'signed', 'by', 'which', 'treaty', 'was'], ids=4, slots=16, names=True)
    slot = lambda ids: [i for i in ids if t.first_slot<=i<t.first_slot+t.slots]
    a,s = t.encode('who founded the Bay of Zed Trust, and who founded Kel Mar 9?', t.start())
    assert [s.words[i-t.first_slot] for i in slot(a)]==['Bay of Zed Trust', 'Kel Mar 9']
    for text in ('is Bay of Zed Trust in Kel Mar 9', 'Bay of Zed Trust (Kel Mar 9)', "Bay of Zed Trust Kel Mar 9's"): assert slot(t.encode(text, s, new=False)[0])==slot(a), text
    b,s = t.encode('which treaty was signed by Norland and Sudland?', s)
    assert len(slot(b))==2 and slot(t.encode('treaty signed Norland and Sudland', s, new=False)[0])==slot(b) and slot(t.encode('Norland Sudland', s, new=False)[0])==slot(b)
    c,s2 = t.encode('Zed is in Bay of Zed', s)                                   # a part of a name is another name
    assert not {*slot(c)} & {*slot(a)} and s2.words[:4]==s.words[:4]
    long = 'Ab'+'c'*60+' De Fg'                                                  # together too long for a slot: one word at a time
    d,s3 = t.encode(f'is {long} in', s)
    assert s3.lost==s.lost and t.decode(d, s3)==f'is {long} in'

@pytest.mark.parametrize('names', [False, True])
def test_escaped_text_holds_no_control_token(names):
    "Whatever is written: after `escape_control` no piece is a control token, and `encode` has nothing to refuse."
    rng,t = random.Random(7),K.SlotTokenizer(['is'], ids=4, slots=8, names=names)
    control = {t.id(x) for x in (*STRUCTURAL_TOKENS, *(f'[{c}_{k}]' for c in 'TA' for k in range(1, 5)))}
    parts = ['[', '[', '[', ']', ']', ']', 'A_', 'A_', 'T_', 'KW', 'DEP', 'PLAN', '/', 'TRACE', 'SubQ', '\\', ' ', 'x', '-', "'s", '\u0663', '\ud800', '1234567890', '999999999', *map(str, range(10))]
    texts = [''.join(rng.choice(parts) for _ in range(rng.randint(1, 20))) for _ in range(3000)] + ['[A_1234567890]', '[T_1234567890]', '[A_999999999]', '[A_0]', '[[A_1]]', '[\\[KW]', '[A_\u0663]']
    live = 0
    for s in texts:
        ids,table = t.encode(escape_control(s), t.start())
        assert not control&set(ids), s
        own = [w for w,_ in K.pieces(s) if K._control.fullmatch(w)]
        live += len(own)
        assert all(escape_control(w)!=w for w in own)
    assert live>20
    for s in ('[A_1234567890]', '[T_1234567890]'): assert t.decode(*t.encode(s, t.start()))==s   # not escaped: still nothing but text

@pytest.mark.parametrize('names', [False, True])
def test_a_table_has_a_greatest_size(names):
    "Long words get no slot; whatever is said, a table takes no more than `table_bytes`."
    t = K.SlotTokenizer(['is'], ids=4, slots=6, names=names)
    ids,s = t.encode('is '+'x'*64+' '+'y'*65+' '+'z'*10**6, t.start())
    assert s.lost==2 and t.decode(ids, s)=='is '+'x'*64+' [UNK] [UNK]' and 'x'*64 in s.words
    rng = random.Random(1)
    for _ in range(200):
        _,s = t.encode(' '.join(rng.choice('xé\U0001d538')*rng.randint(1, 200)+str(rng.random())[2:] for _ in range(rng.randint(1, 9))), s)
        assert s.nbytes==len(json.dumps(s.dump()).encode())<=K.table_bytes(6)
    _,s = t.encode(' '.join('\U0001d538'*63+c for c in '𝔸𝔹𝔻𝔼𝔽𝔾'), s)
    assert .8*K.table_bytes(6)<s.nbytes<=K.table_bytes(6)

@pytest.mark.parametrize('names', [False, True])
def test_tables_round_trip(names):
    rng,t = random.Random(2),K.SlotTokenizer(['is'], ids=4, slots=5, names=names)
    s = t.start(rng)
    for _ in range(300):
        _,s = t.encode(''.join(rng.choice(['Ka', 'Lo', "'s", '-', ' ', '\x00', '—', '@', '[', "O'Neil", 'é', '_', '’', '\ud800']) for _ in range(8)), s)
        assert K.SlotTable.load(json.loads(json.dumps(s.dump())))==s

TABLE = dict(words=['Kel', 'Mar', ''], last=[1, 2, -1], order=[2, 0, 1], tick=2, evicted=0, lost=1)
@pytest.mark.parametrize('field,change', [('words', dict(words='abc')), ('words', dict(words=['Kel', 1, ''])), ('words', dict(words=['Kel', '[A_1]', ''])), ('words', dict(words=['Kel', '[KW]', ''])),
    ('words', dict(words=['Kel', 'a, b', ''])), ('words', dict(words=['Kel', 'a  b', ''])), ('words', dict(words=['Kel', 'a [A_1]', ''])), ('words', dict(words=['Kel', ' ', ''])), ('words', dict(words=['Kel', 'a\nb', ''])), ('words', dict(words=['Kel', 'Kel', ''])), ('words', dict(words=['Kel', 'x'*65, ''])),
    ('last', dict(last=[1, 2])), ('last', dict(last=[1, 2, None])), ('last', dict(last=[1, 2, True])), ('last', dict(last=[1, 3, -1])), ('last', dict(last=[1, 2, -2])),
    ('order', dict(order=[0, 1])), ('order', dict(order=[0, 1, 1])), ('order', dict(order=[1, 2, 3])), ('order', dict(order=['0', '1', '2'])), ('order', dict(order={})),
    ('tick', dict(tick=-1)), ('tick', dict(tick=2.)), ('tick', dict(tick=True)), ('evicted', dict(evicted=None)), ('lost', dict(lost='1')), ("'more'", dict(more=0))])
def test_damaged_tables_are_refused(field, change):
    assert K.SlotTable.load(TABLE).dump()==TABLE
    with pytest.raises(K.CheckpointError, match=f'^slot table: {field} '): K.SlotTable.load(TABLE|change)
    for k in TABLE:
        with pytest.raises(K.CheckpointError, match=f"'{k}' is missing"): K.SlotTable.load({x:v for x,v in TABLE.items() if x!=k})
    for d in (None, [], 'x', 5):
        with pytest.raises(K.CheckpointError, match='^slot table: '): K.SlotTable.load(d)

def test_extra_tokens_cannot_be_written():
    t = K.SlotTokenizer(['Q'])
    assert t.id('[Q]') not in t.encode('[Q] [PAD] [UNK] [S_0] [+]', t.start())[0]

# ---- adapters ----------------------------------------------------------------------------------------------------------------

def test_adapters_count_and_learn(ids):
    pytest.importorskip('peft')
    with torch.device('meta'): big = M.Mamba2LM(M.MambaConfig(vocab_size=50288, hidden_size=2560, num_hidden_layers=64, state_size=128))
    assert sum(p.numel() for p in M.lora(big).parameters() if p.requires_grad)==10_657_792
    m = make(1)
    t = M.lora(m)
    with torch.no_grad():
        for n,p in t.named_parameters():
            if 'lora_B' in n: p.normal_(std=.1)           # at zero, A would get no gradient
    t(input_ids=ids[:,:40], labels=ids[:,:40]).loss.backward()
    g = {n:p.grad.abs().max().item() for n,p in t.named_parameters() if p.requires_grad}
    assert len(g)==2*2*3 and min(g.values())>0
    with_adapter = m.use('torch').prefill(ids[:,:40])[0]
    with t.disable_adapter(): assert gap(m.prefill(ids[:,:40])[0], with_adapter)>1e-2
    with pytest.raises(M.MambaError, match='merge the adapter first'): m.use('numba')
    merged = t.merge_and_unload().use('numba')
    assert gap(merged.prefill(ids[:,:40])[0], with_adapter)<1e-4
    assert gap(merged.prefill(ids[:,:5])[0], merged.use('torch').prefill(ids[:,:5])[0])<1e-4
