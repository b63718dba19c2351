"The Transformer twin: both variants give the numbers of one long forward, whatever the pieces, the batch and the history of a state."
import json, random, subprocess, sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from cmtrag import twin as W

V = 300
KEEP = (False, True)

def gap(a, b): return (a-b).abs().max().item()

def make(keep=False, attention='sdpa', window=1024, seed=0, **kw):
    torch.manual_seed(seed)
    m = W.TwinLM.fresh(W.twin_config(60_000, V, window), attention, keep=keep, **kw)
    with torch.no_grad():
        for p in m.model.parameters(): p += .1*torch.randn(p.shape)
    return m

def whole(m, ids):
    "Logits at every place of one conversation, by the library's own forward."
    with torch.no_grad(): return m.model(torch.tensor([ids]), use_cache=False).logits[0]

def words(n, seed=1): return random.Random(seed).choices(range(V), k=n)

@pytest.fixture(scope='module', params=KEEP, ids=('reads again', 'keeps'))
def m(request): return make(request.param)

# ---- one function, many ways -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('l', (1, 2, 3, 63, 64, 65))
def test_a_part_of_any_length_after_any_other(m, l):
    ids = words(70+l+5)
    want = whole(m, ids)
    assert want.abs().max()>1
    a,s = m.prefill([ids[:70]])
    b,s = m.prefill([ids[70:70+l]], state=s)
    c,s = m.prefill([ids[70+l:]], state=s)
    assert gap(torch.cat([a, b, c]), want[[69, 69+l, -1]])<1e-4
    assert s.tokens==(len(ids),) and s.ids==(tuple(ids),)

@pytest.mark.parametrize('attention', W.ATTENTION)
@pytest.mark.parametrize('keep', KEEP)
def test_random_splits_in_prefills_and_steps(keep, attention):
    m,rng,ids = make(keep, attention),random.Random(3),words(200)
    want = whole(m, ids)
    for _ in range(4):
        s,at = m.start(),0
        while at<len(ids):
            n = min(rng.choice((1, 2, 3, 17, 63, 64, 65)), len(ids)-at)
            l,s = m.prefill([ids[at:at+n]], state=s)
            at += n
            assert gap(l[0], want[at-1])<1e-4
            d = m.decoder(s)
            for _ in range(min(rng.choice((0, 1, 5)), len(ids)-at)):
                assert gap(d.step([ids[at]])[0], want[at])<1e-4
                at += 1
            s = d.state()
            assert s.tokens==(at,)

def test_steps_alone_from_the_start(m):
    ids = words(150)
    d = m.decoder(m.start())
    assert gap(torch.cat([d.step([i]) for i in ids]), whole(m, ids))<1e-4          # 150: the buffer grows twice

def test_a_batch_of_unequal_rows_is_each_row_alone(m):
    rows = [words(n, n) for n in (1, 2, 3, 63, 64, 65, 130, 7)]
    more = [words(n, n+500) for n in (65, 1, 3, 2, 64, 9, 1, 30)]
    _,s = m.prefill(rows)
    s = m.decoder(s).state()
    l,s = m.prefill(more, state=s)
    d = m.decoder(s)
    steps = [d.step([5]*8), d.step([6]*8)]
    for i,(a,b) in enumerate(zip(rows, more)):
        want = whole(m, [*a, *b, 5, 6])
        assert gap(torch.stack([l[i], steps[0][i], steps[1][i]]), want[-3:])<1e-4
    assert d.state().ids==tuple((*a, *b, 5, 6) for a,b in zip(rows, more))

def test_rows_of_several_states_packed_and_taken_out(m):
    parts = [m.decoder(m.prefill([words(n, n)])[1]).state() for n in (5, 40, 12)]
    s = W.TwinState.cat(parts)
    assert s.tokens==(5, 40, 12) and len(s)==3 and s.nbytes==sum(p.nbytes for p in parts)
    s = s[[2,0]]
    assert s.tokens==(12, 5) and s[1].ids==parts[0].ids
    l,_ = m.prefill([[1,2],[3]], state=s)
    assert gap(torch.stack([*l]), torch.stack([whole(m, [*words(12, 12), 1, 2])[-1], whole(m, [*words(5, 5), 3])[-1]]))<1e-4

def test_decoding_some_rows_only(m):
    rows = [words(n, n) for n in (9, 30, 4, 17)]
    _,s = m.prefill(rows)
    d,text,rng = m.decoder(s),[list(r) for r in rows],random.Random(4)
    for _ in range(25):
        at = rng.sample(range(4), rng.randint(1, 4))                               # in any order
        ids = rng.choices(range(V), k=len(at))
        l = d.step(ids, at)
        for r,i in zip(at, ids): text[r].append(i)
        assert l.shape==(len(at), V)
        for j,r in enumerate(at): assert gap(l[j], whole(m, text[r])[-1])<1e-4
    end = d.state()
    assert end.ids==tuple(map(tuple, text)) and s.tokens==(9, 30, 4, 17)

# ---- states are not written to -----------------------------------------------------------------------------------------------

def greedy(m, s, l, n):
    d,out = m.decoder(s),[]
    for _ in range(n):
        out.append(l.argmax(-1).tolist())
        l = d.step(out[-1])
    return out, l, d.state()

def test_a_state_used_twice_gives_the_same_twice(m):
    l,s = m.prefill([words(30), words(11, 2)])
    kept = [k.clone() for k in s.kv]
    a,la,sa = greedy(m, s, l, 20)
    b,lb,sb = greedy(m, s, l, 20)
    assert a==b and torch.equal(la, lb) and sa.ids==sb.ids
    assert all(map(torch.equal, kept, s.kv)) and s.tokens==(30, 11)
    if m.keep:
        kept = [k.clone() for k in sa.kv]
        first = m.prefill([[1,2], [3]], state=sa)[0]
        assert torch.equal(first, m.prefill([[1,2], [3]], state=sa)[0]) and all(map(torch.equal, kept, sa.kv))

@pytest.mark.parametrize('rows', (1, 2))
def test_two_continuations_do_not_see_each_other(m, rows):
    base = [words(20, i) for i in range(rows)]
    _,s = m.prefill(base)
    d,e = m.decoder(s),m.decoder(s)
    for t in range(70):                                                            # interleaved, past the room of a buffer
        a,b = d.step([t]*rows),e.step([V-1-t]*rows)
    for r in range(rows):
        assert gap(a[r], whole(m, [*base[r], *range(70)])[-1])<1e-4
        assert gap(b[r], whole(m, [*base[r], *range(V-1, V-71, -1)])[-1])<1e-4
    mid = d.state()
    for t in range(5): d.step([t]*rows)                                            # a decoder goes on behind a state it gave
    assert mid.tokens==(90,)*rows
    assert gap(m.prefill([[7]]*rows, state=mid)[0][0], whole(m, [*base[0], *range(70), 7])[-1])<1e-4

# ---- what is kept ------------------------------------------------------------------------------------------------------------

def test_bytes_between_turns():
    size = {}
    for keep in KEEP:
        m = make(keep)
        c,s = m.config,m.decoder(m.prefill([words(30), words(11)])[1]).state()
        size[keep] = s.nbytes
        assert all(k.untyped_storage().nbytes()==k.nbytes for k in s.kv if k is not None)           # no view that holds a larger buffer
    assert size[False]==4*41
    assert size[True]==41*(4+4*2*c.num_hidden_layers*c.hidden_size)

def test_reading_again_reads_again_and_keeping_does_not(monkeypatch):
    read = []
    real = W.TwinLM.read
    monkeypatch.setattr(W.TwinLM, 'read', lambda self, cache, new, rows: read.append(sum(map(len, new))) or real(self, cache, new, rows))
    for keep,want in ((False, [30, 1, 36]), (True, [30, 1, 5])):
        m = make(keep)
        read.clear()
        d = m.decoder(m.prefill([words(30)])[1])
        d.step([1])
        m.prefill([words(5)], state=d.state())
        assert read==want
        read.clear()
        m.prefill([words(5)], state=m.prefill([words(30)])[1])                     # without a decoder between: the same
        assert read==[30, 5 if keep else 35]

def test_states_in_another_process(tmp_path):
    make().model.save_pretrained(tmp_path/'model')
    for keep in KEEP:
        m = make(keep)
        (tmp_path/f'state{keep}').write_bytes(m.decoder(m.prefill([words(30), words(11, 2)])[1]).state().dump())
    code = '''
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from cmtrag.twin import load_twin
at,out = Path(sys.argv[1]),{}
for keep in (False, True):
    m = load_twin(at/'model', keep=keep)
    s = m.load_state((at/f'state{keep}').read_bytes())
    assert s.tokens==(30, 11) and s.kv==(None, None)
    out |= {f'prefill{keep}': m.prefill([[1,2], [3]], state=s)[0], f'step{keep}': m.decoder(s).step([4, 5])}
save_file(out, at/'out')
'''
    subprocess.run([sys.executable, '-c', code, str(tmp_path)], check=True)
    out = load_file(tmp_path/'out')
    for keep in KEEP:
        m = make(keep)
        s = m.decoder(m.prefill([words(30), words(11, 2)])[1]).state()
        assert gap(out[f'prefill{keep}'], m.prefill([[1,2], [3]], state=s)[0])<1e-4
        assert gap(out[f'step{keep}'], m.decoder(s).step([4, 5]))<1e-4

# ---- the window --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keep', KEEP)
def test_a_full_window_drops_whole_turns_and_counts_them(keep):
    m,s,seen = make(keep, window=64, room=20, starts=[0]),None,[]
    for t in range(12):
        turn = [0, *[1+x for x in words(6, t) if x<V-1]]
        n = len(turn)
        seen += turn
        l,s = m.prefill([turn], state=s)
        d = m.decoder(s)
        for i in (5, 6, 7): d.step([i])
        seen += [5, 6, 7]
        held = seen[len(seen)-3-len(s.ids[0]):-3]
        assert s.ids[0]==tuple(held) and held[0]==0 and s.dropped[0]+len(held)==len(seen)-3
        assert len(held)+20<=64
        assert gap(l[0], whole(m, held)[-1])<1e-4
        s = d.state()
    assert s.dropped[0]>0 and s.tokens==(len(seen),)
    assert W.load_twin_state(s.dump()).dropped==s.dropped

def test_one_full_row_beside_one_that_is_not():
    m = make(True, window=64, room=4)
    s = m.decoder(m.prefill([words(55), words(10, 2)])[1]).state()
    l,s = m.prefill([words(12, 3), words(12, 3)], state=s)
    assert s.dropped==(7, 0) and s.tokens==(67, 22)
    assert gap(l[0], whole(m, [*words(55)[7:], *words(12, 3)])[-1])<1e-4
    assert gap(l[1], whole(m, [*words(10, 2), *words(12, 3)])[-1])<1e-4

def test_spare_cuts_less_often():
    cuts = {}
    for spare in (0, 20):
        m,s,gone = make(True, window=64, room=4, spare=spare),None,[]
        for t in range(20):
            _,s = m.prefill([words(5, t)], state=s)
            gone.append(s.dropped[0])
        cuts[spare] = sum(b>a for a,b in zip(gone, gone[1:]))
    assert 0<cuts[20]<cuts[0]

def test_a_window_that_ends_within_a_plan():
    m = make(window=16, room=2)
    with pytest.raises(W.TwinError, match='do not fit into a window of 16'): m.prefill([words(15)])
    d = m.decoder(m.prefill([words(14)])[1])
    d.step([1]); d.step([2])
    with pytest.raises(W.TwinError, match='window of 16 tokens is full'): d.step([3])
    assert d.state().tokens==(16,)

# ---- refused -----------------------------------------------------------------------------------------------------------------

def test_prompts_and_ids_that_cannot_be(m):
    for bad,say in (([], 'at least one token'), ([[]], 'at least one token'), ([[1], []], 'at least one token'), ([[V]], f'0 to {V-1}'), ([[-1]], f'0 to {V-1}')):
        with pytest.raises(W.TwinError, match=say): m.prefill(bad)
    d = m.decoder(m.start(2))
    for ids,rows in (([1], None), ([1, 2, 3], None), ([1, 1], [0, 0]), ([1], [2]), ([1], [-1]), ([1, 2], [0])):
        with pytest.raises(W.TwinError, match='ids for rows'): d.step(ids, rows)
    with pytest.raises(W.TwinError, match=f'0 to {V-1}'): d.step([V, 0])
    assert d.state().tokens==(0, 0)

def test_states_that_do_not_belong(m):
    other = make(not m.keep)
    _,s = other.prefill([[1,2]])
    with pytest.raises(W.TwinError, match=f'keep={not m.keep}, this twin has keep={m.keep}'): m.prefill([[1]], state=s)
    with pytest.raises(W.TwinError, match=f'keep={not m.keep}'): m.load_state(s.dump())
    with pytest.raises(W.TwinError, match='one variant'): W.TwinState.cat([s, m.start()])
    with pytest.raises(W.TwinError, match='one variant'): W.TwinState.cat([])
    with pytest.raises(W.TwinError, match='is a tuple'): m.prefill([[1]], state=(1,))
    with pytest.raises(W.TwinError, match='2 rows, needed are 1'): m.prefill([[1]], state=m.start(2))
    wide = W.TwinLM.fresh(W.twin_config(200_000, V), keep=m.keep)
    with pytest.raises(W.TwinError, match='this model needs'): m.decoder(wide.prefill([[1,2]])[1])
    with pytest.raises(W.TwinError, match=f'0 to {V-1}'): m.load_state(W.TwinState(((V,),), (None,), (0,), m.keep).dump())
    with pytest.raises(W.TwinError, match='window has 1024'): m.decoder(W.TwinState(((1,)*1025,), (None,), (0,), m.keep))

def test_bytes_that_are_no_state(m):
    from safetensors.torch import load, save
    b = m.start().dump()
    d = load(b)
    for bad,say in ((b'', 'no saved state'), (b[:-3], 'no saved state'), (save(dict(a=torch.zeros(1))), "this holds .'a'."),
                    (save(d | dict(lengths=torch.tensor([3]))), 'add up'), (save(d | dict(lengths=torch.tensor([1,-1]), dropped=torch.tensor([0,0]))), 'add up')):
        with pytest.raises(W.TwinError, match=say): W.load_twin_state(bad)

def test_training_mode_is_refused(m):
    m.model.train()
    try:
        with pytest.raises(W.TwinError, match='training mode'): m.prefill([[1]])
    finally: m.model.eval()

# ---- size and disk -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n,vocab', [(60_000, 300), (100_000, 600), (535_728, 512), (622_304, 640), (1_500_000, 640), (20_000_000, 8000), (130_000_000, 50288), (2_702_599_680, 50288)])
def test_the_size_is_met(n, vocab):
    c = W.twin_config(n, vocab)
    with torch.device('meta'): got = GPTNeoXForCausalLM(c).num_parameters()
    assert abs(got/n-1)<=.03 and c.tie_word_embeddings and c.vocab_size==vocab and c.max_position_embeddings==8192
    assert c.hidden_size//c.num_attention_heads%8==0

def test_a_size_that_cannot_be():
    for n,vocab in ((60_000, 50_000), (100, 10)):
        with pytest.raises(W.TwinError, match='the embedding alone'): W.twin_config(n, vocab)

def pythia(folder):
    "A folder in the layout of Pythia: untied, the head under its old name, buffers among the weights."
    torch.manual_seed(0)
    m = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=128)).eval()
    m.save_pretrained(folder)
    d = {k.replace('lm_head.', 'embed_out.'): v.clone() for k,v in m.state_dict().items()}
    d |= {f'gpt_neox.layers.{l}.attention.{k}': torch.zeros(1) for l in (0, 1) for k in ('bias', 'masked_bias', 'rotary_emb.inv_freq')}
    save_file(d, folder/'model.safetensors', metadata=dict(format='pt'))
    return m, d

@pytest.mark.parametrize('attention', W.ATTENTION)
def test_a_folder_like_pythias(tmp_path, attention):
    m,_ = pythia(tmp_path)
    t,ids = W.load_twin(tmp_path, keep=True, attention=attention, room=8),words(40)
    assert t.window==128 and t.config._attn_implementation==attention and not torch.equal(t.model.lm_head.weight, t.model.gpt_neox.embed_in.weight)
    with torch.no_grad(): assert gap(t.prefill([ids])[0][0], m(torch.tensor([ids])).logits[0,-1])<1e-4

def test_half_precision(tmp_path):
    pythia(tmp_path)
    a,b = W.load_twin(tmp_path, keep=True, room=8),W.load_twin(tmp_path, keep=True, dtype=torch.bfloat16, room=8)
    la,sa = a.prefill([words(40), words(7)])
    lb,sb = b.prefill([words(40), words(7)])
    assert lb.dtype==torch.float32 and sb.kv[0].dtype==torch.bfloat16 and 2*sb.kv[0].nbytes==sa.kv[0].nbytes
    assert gap(la, lb)<.05*max(1, la.abs().max())
    assert gap(a.decoder(sa).step([1,2]), b.decoder(sb).step([1,2]))<.05*max(1, la.abs().max())

def test_folders_that_cannot_be_used(tmp_path):
    _,d = pythia(tmp_path)
    with pytest.raises(W.TwinError, match="'flash_attention_2' is not allowed"): W.load_twin(tmp_path, attention='flash_attention_2')
    w,f = tmp_path/'model.safetensors',tmp_path/'config.json'
    save_file({k:v for k,v in d.items() if 'layers.1.mlp' not in k}, w, metadata=dict(format='pt'))
    with pytest.raises(W.TwinError, match=r'layers.1.mlp.* got no weights \(4 missing\)'): W.load_twin(tmp_path)
    w.write_bytes(w.read_bytes()[:1000])
    with pytest.raises(W.TwinError, match='cannot be loaded'): W.load_twin(tmp_path)
    w.unlink()
    with pytest.raises(W.TwinError, match='no safetensors$'): W.load_twin(tmp_path)
    (tmp_path/'pytorch_model.bin').write_bytes(b'not read')
    with pytest.raises(W.TwinError, match='pytorch_model.bin is a pickle and is not read: convert it with cmtrag.checkpoints.convert_bin'): W.load_twin(tmp_path)
    c = json.loads(f.read_text())
    f.write_text(json.dumps(c | dict(model_type='llama')))
    with pytest.raises(W.TwinError, match="model_type='llama' is not a twin"): W.load_twin(tmp_path)
    f.write_text('{')
    with pytest.raises(W.TwinError, match='not JSON'): W.load_twin(tmp_path)
    f.unlink()
    with pytest.raises(W.TwinError, match='no config.json'): W.load_twin(tmp_path)
