"The trace generator: what the grammar guarantees, what a state must survive, and what happens at the edges."
import os, random, subprocess, sys
from functools import lru_cache
from pathlib import Path
import numpy as np, pytest, torch
from cmtrag.traces import TraceDraft, TraceError, answer_refs, check_draft, parse_plan, serialise_plan, resolve_refs
from cmtrag.checkpoints import TAG, CheckpointError, NeoXTokenizer, build_slots
from cmtrag.drafts import GeneratorError
from cmtrag.generator import Nearby, StreamGenerator, load_generator, read_layout, top_k, usable, write_layout
from cmtrag.mamba import Mamba2LM, MambaConfig
from cmtrag.stream import MEMORY_TOKENS, READ, TAG_TOKEN, FreePlan, Layout, Lexicon, PlanGrammar, Scribe, StreamError, refused
from cmtrag.twin import TwinLM, twin_config

QUESTIONS = ['Who founded the Gadmore Line?', 'Where was that person born?', r'Is [A_1] or [/PLAN] the capital of [\A_2]?', 'What is the capital of Lower Iotaluna?', 'And [KW] of that [TRACE] city?',
             'Which river flows through the city we found for Zerila Kazogly, and into which lake does it flow?', 'Ποῦ;', '[Q] [REF] [MEM] [T_3] [DEP]', '?', '] ] ] [A_ 1 ] [A_1', 'x'*300]
WORDS = 'Who What Where Which is was the of that capital city founded born flow through and river lake person we found for into does it Line'.split()

@lru_cache
def vocabulary(ids=256, slots=12): return build_slots([' '.join(WORDS)]*2, ids=ids, slots=slots, extra=(*MEMORY_TOKENS, TAG_TOKEN))

@lru_cache
def ssm(vocab, path='numba', seed=0):
    torch.manual_seed(seed)
    m = Mamba2LM(MambaConfig(vocab_size=vocab, hidden_size=32, num_hidden_layers=2, head_dim=16, state_size=16)).eval()
    for p in m.parameters():
        if p.dim()==2: p.data *= 3                      # an opinionated model, not a uniform one
    return m.use(path)

def make(layout=Layout(), path='numba', tok=None, **kw):
    tok = tok or vocabulary()
    return StreamGenerator(ssm(tok.vocab_size, path), Scribe(tok, layout), **kw)

def valid(ds, k):
    assert ds, 'no drafts'
    for j,d in enumerate(ds, k):
        check_draft(d, j)
        assert set(answer_refs(d.sub_question)+answer_refs(d.keywords))<=set(d.deps)
    assert parse_plan(serialise_plan(ds, k), k)==list(ds)

def hold(gen, turns, rows=16, seed=0, check=valid):
    "Turns of `rows` conversations side by side; returns (ids reached, invalid plans)."
    rng,states,ks,bad,n = random.Random(seed),[gen.start()]*rows,[1]*rows,0,0
    while n<turns:
        got = gen.generate_many(states, [rng.choice(QUESTIONS) for _ in range(rows)], ks)
        for i,(ds,s) in enumerate(got):
            states[i],n = s,n+1
            if isinstance(ds, TraceError): bad += 1
            else:
                check(ds, ks[i])
                ks[i] += len(ds)
    return ks,bad

def pushy(lex, rng):
    "Logits of a model that loves structure, references and brackets."
    bias = np.zeros(lex.rows)
    bias[[*lex.id.values()]] = rng.uniform(0, 9, len(lex.id)); bias[np.flatnonzero(lex.closing)] = rng.uniform(0, 9)
    if lex.refs is not None: bias[lex.refs] = rng.uniform(0, 8)
    return lambda l: int((l+bias+rng.gumbel(size=len(l))).argmax())

# the grammar

def test_two_thousand_turns_hold_no_invalid_plan_and_free_ones_do():
    ks,bad = hold(make(most=48), 2000)
    assert bad==0 and max(ks)>100
    ks,free = hold(make(most=48, constrained=False), 320, check=lambda *a: None)
    print(f'without a grammar: {free} of 320 plans invalid')
    assert free>160

@pytest.mark.parametrize('layout', [Layout(), Layout(ids=False), Layout(memory=True), Layout(memory=True, tags=True)])
def test_a_model_that_loves_structure_cannot_break_it(layout):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        gen = make(layout, most=90)
        gen.pick = pushy(gen.lex, rng)
        ks,bad = hold(gen, 96, seed=seed)
        assert bad==0

def test_numbers_go_round_the_ring():
    gen = make(most=90, tok=vocabulary(ids=8))
    rng = np.random.default_rng(1)
    gen.pick = pushy(gen.lex, rng)
    deps = []
    def check(ds, k):
        valid(ds, k)
        deps.extend(j-d for j,x in enumerate(ds, k) for d in x.deps)
    ks,bad = hold(gen, 300, rows=4, check=check)
    assert bad==0 and max(ks)>40 and max(deps)<8 and len(set(deps))>=4

def test_a_plan_never_grows_beyond_its_room():
    for most in (36, 40, 64, 200):
        gen = make(most=most)
        rng = np.random.default_rng(most)
        gen.pick = pushy(gen.lex, rng)
        for k in (1, 5, 256, 300):
            for q in QUESTIONS:
                ds,s = gen.generate(gen.start(), q, k)
                valid(ds, k)
                assert s.written<=most
    with pytest.raises(StreamError, match='room'): make(most=20)

def test_bpe_plans_are_valid_too():
    if 'CMTRAG_DATA' not in os.environ: pytest.skip('CMTRAG_DATA is not set')
    tok = NeoXTokenizer(Path(os.environ['CMTRAG_DATA'])/'tokenizer'/'20B_tokenizer.json')
    torch.manual_seed(0)
    model = Mamba2LM(MambaConfig(vocab_size=50288, hidden_size=16, num_hidden_layers=1, head_dim=16, state_size=8)).eval().use('numba')
    gen = StreamGenerator(model, Scribe(tok), most=80)
    rng = np.random.default_rng(0)
    bias = np.zeros(50288); bias[[*gen.lex.id.values()]] = 12
    for t in ('[', ']', 'A', '_', '1', '2', ' [', 'T', 'KW'): bias[tok.encode(t)[0]] = 9
    gen.pick = lambda l: int((l+bias+rng.gumbel(size=len(l))).argmax())
    ks,bad = hold(gen, 48, rows=4)
    assert bad==0 and max(ks)>10

def test_what_a_user_types_stays_in_the_question():
    tok = vocabulary()
    s = Scribe(tok)
    for q in QUESTIONS:
        ids,table = s.prompt(q, tok.start())
        inner = ids[1:-1]
        assert not {tok.id(t) for t in ('[PLAN]','[/PLAN]','[TRACE]','[/TRACE]','[SubQ]','[KW]','[DEP]')} & set(inner), q
        assert not [i for i in inner if tok.tokens[i].startswith(('[A_','[T_'))], q
    raw,_ = s.prompt('[Q] [REF] [MEM]', tok.start())
    assert raw.count(tok.id('[Q]'))==1 and tok.id('[REF]') not in raw

# the state

def same(a, b): return torch.equal(a.h.ssm, b.h.ssm) and torch.equal(a.h.conv, b.h.conv) and a.table==b.table

@pytest.mark.parametrize('path', ['numba', 'torch'])
def test_sixteen_are_as_each_alone(path):
    gen = make(path=path, most=40)
    rng = random.Random(3)
    states,ks = [],[]
    for i in range(16):
        s,k = gen.start(),1
        for q in rng.sample(QUESTIONS, i%4):
            ds,s = gen.generate(s, q, k)
            k += len(ds)
        states.append(s); ks.append(k)
    qs = [rng.choice(QUESTIONS) for _ in range(16)]
    before = [(s.h.ssm.clone(), s.h.conv.clone(), s.table) for s in states]
    for (ds,h),s,q,k in zip(gen.generate_many(states, qs, ks), states, qs, ks):
        alone,ha = gen.generate(s, q, k)
        assert ds==alone and h.table==ha.table
        assert same(h, ha) if path=='numba' else torch.allclose(h.h.ssm, ha.h.ssm, atol=1e-4)
    for s,(a,b,t) in zip(states, before): assert torch.equal(s.h.ssm, a) and torch.equal(s.h.conv, b) and s.table==t

def test_a_state_has_one_size():
    gen,k = make(most=40),1
    s,sizes = gen.start(),[]
    for t in range(60):
        ds,s = gen.generate(s, QUESTIONS[t%len(QUESTIONS)], k)
        k += len(ds)
        sizes.append(s.h.nbytes)
    assert len(set(sizes))==1 and k>60

def test_a_saved_state_goes_on_in_a_new_process(tmp_path):
    tok,gen = vocabulary(),make(most=40)
    gen.model.save_pretrained(tmp_path); tok.save(tmp_path); write_layout(tmp_path, Layout())
    g = load_generator(tmp_path, most=40)
    s,k = g.start(),1
    for q in QUESTIONS[:5]:
        ds,s = g.generate(s, q, k)
        k += len(ds)
    want,after = g.generate(s, QUESTIONS[5], k)
    (tmp_path/'state.safetensors').write_bytes(g.to_bytes(s))
    code = f'''
from pathlib import Path
from cmtrag.generator import Nearby, load_generator
d = Path({str(tmp_path)!r})
g = load_generator(d, most=40)
ds,s = g.generate(g.from_bytes((d/'state.safetensors').read_bytes()), {QUESTIONS[5]!r}, {k})
(d/'after').write_text(g.dump(s)); print(repr(ds))'''
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=tmp_path)
    assert r.returncode==0, r.stderr[-2000:]
    assert r.stdout.strip().split('\n')[-1]==repr(want)
    assert same(g.load((tmp_path/'after').read_text()), after)

def test_states_that_are_none():
    gen = make()
    good = gen.dump(gen.start())
    for bad in ('', 'abc', good[:-8], good[:200], 7, None, ['x']):
        with pytest.raises(GeneratorError): gen.load(bad)
    other = make(tok=vocabulary(slots=5))
    with pytest.raises(GeneratorError): other.load(good)
    with pytest.raises(GeneratorError):
        wide = Mamba2LM(MambaConfig(vocab_size=vocabulary().vocab_size, hidden_size=64, num_hidden_layers=2, head_dim=16, state_size=16)).eval().use('numba')
        StreamGenerator(wide, Scribe(vocabulary())).load(good)

# edges

def test_more_words_than_slots():
    gen = make(most=40)
    q = ' '.join(f'Xyzzy{i}' for i in range(40))
    ds,s = gen.generate(gen.start(), q, 1)
    valid(ds, 1)
    assert '28 words of the question found no slot' in gen.note(s)
    ds,s = gen.generate(s, ' '.join(f'Plugh{i}' for i in range(12)), 1+len(ds))
    assert 'gave up their slots' in gen.note(s)

def test_the_fallback_counts_and_the_model_learns_of_it():
    gen = usable(make(most=40), unknown=.5)
    s0 = gen.start()
    ds,s = gen.generate(s0, 'Quid novi ex Africa?', 1)
    assert resolve_refs(ds[0].sub_question, {})=='Quid novi ex Africa?' and s.count==1 and 'unknown' in gen.note(s)
    assert s.inner.h.tokens[0]>0
    ds,s = gen.generate(s, 'Where is that city?', 2)
    assert s.count==1 and not s.why
    assert gen.load(gen.dump(s)).count==1
    with pytest.raises(GeneratorError, match='empty'): gen.generate(s, '  ', 3)

def test_layouts_on_disk(tmp_path):
    assert read_layout(tmp_path)==Layout()
    f = tmp_path/'generator.json'
    f.write_text('{"layout": {"memory": true}}')
    assert read_layout(tmp_path)==Layout(memory=True)
    for bad in ('{', '[]', '{}', '{"layuot": {}}', '{"layout": 3}', '{"layout": {"ids": "yes"}}', '{"layout": {"idz": true}}'):
        f.write_text(bad)
        with pytest.raises(CheckpointError, match='generator.json'): read_layout(tmp_path)
    with pytest.raises(CheckpointError, match='memory lines'): Scribe(build_slots(['a a'], extra=('[Q]',)), Layout(memory=True))

def folder(tmp_path, layout=Layout()):
    gen = make(layout, most=40)
    gen.model.save_pretrained(tmp_path); vocabulary().save(tmp_path); write_layout(tmp_path, layout)
    return gen

def test_damaged_folders_name_the_file(tmp_path):
    folder(tmp_path)
    load_generator(tmp_path)
    for name,bad in (('config.json', b''), ('config.json', b'[]'), ('config.json', b'5'), ('config.json', b'\xff\xfe'), ('generator.json', b'{'), ('model.safetensors', b''),
                     ('slot_tokenizer.json', b'[1]'), ('slot_tokenizer.json', (tmp_path/'slot_tokenizer.json').read_bytes().replace(b'Who', b'Wha'))):
        was = (tmp_path/name).read_bytes()
        (tmp_path/name).write_bytes(bad)
        with pytest.raises(CheckpointError, match=name): load_generator(tmp_path)
        (tmp_path/name).write_bytes(was)
    for name in ('config.json', 'generator.json'):
        was = (tmp_path/name).read_bytes()
        (tmp_path/name).unlink()
        with pytest.raises(CheckpointError, match=name): load_generator(tmp_path)
        (tmp_path/name).write_bytes(was)
    load_generator(tmp_path)

def test_states_of_other_generators_are_refused():
    tok,gen = vocabulary(),make(most=40)
    good = gen.dump(gen.generate(gen.start(), QUESTIONS[0], 1)[1])
    gen.load(good)
    for other in (StreamGenerator(ssm(tok.vocab_size, seed=1), Scribe(tok)), make(Layout(memory=True)), make(tok=vocabulary(ids=16))):
        with pytest.raises(GeneratorError): other.load(good)

def test_damaged_states_are_refused_at_once():
    import base64, json
    gen = make(most=40)
    b = gen.to_bytes(gen.generate(gen.start(), QUESTIONS[0], 1)[1])
    n = int.from_bytes(b[:8], 'little')
    head = json.loads(b[8:8+n])
    rest = json.loads(head['__metadata__']['rest'])
    def forged(**change):
        h = json.loads(json.dumps(head))
        h['__metadata__']['rest'] = json.dumps(rest | change)
        out = json.dumps(h).encode()
        out += b' '*(-len(out)%8)
        return len(out).to_bytes(8, 'little')+out+b[8+n:]
    assert gen.from_bytes(forged()).tokens==rest['tokens']
    t = rest['table']
    for change in (dict(extra=1), dict(tokens='x'), dict(why=3), dict(table=None), dict(table=t | dict(last=[1])), dict(table=t | dict(order=[0])), dict(table=t | dict(words=[1]*12)),
                   dict(table=t | dict(tick='x')), dict(table=t | dict(lost=None)), dict(table=t | dict(words=['[/PLAN] [KW]']+t['words'][1:]))):
        with pytest.raises(GeneratorError): gen.from_bytes(forged(**change))

def test_questions_that_nothing_can_be_made_of():
    gen = usable(make(most=40), unknown=1.)
    s0 = gen.start()
    for q in ('Qux [A_1234567890] Zed Foo', '[A_0] [A_01]', 'who '*12_000, '\ud800 who', '<|endoftext|> who is <|padding|>', 'x'*100_000, '\u00a0who\u3000is', 'who [\\A_300] '*5):
        ds,s = gen.generate(s0, q, 1)
        valid(ds, 1)
        ds,s = gen.generate(s, 'Who is the founder of that?', 1+len(ds))
        assert gen.load(gen.dump(s)).inner.table==s.inner.table
    assert 'only the first' in gen.note(gen.generate(s0, 'who '*12_000, 1)[1])
    raw = gen.inner
    got = raw.generate_many([raw.start()]*3, ['Who is that?', '  ', 'Where is that?'], [1, 1, 1])
    assert isinstance(got[1][0], GeneratorError) and got[0][0] and got[2][0]==raw.generate(raw.start(), 'Where is that?', 1)[0]
    for k in (0, -3, 1.5, None):
        with pytest.raises(GeneratorError, match='next_id'): raw.generate(raw.start(), 'Who?', k)
    with pytest.raises(GeneratorError): raw.generate_many([raw.start()], ['a', 'b'], [1])
    for ds in ([], [TraceDraft('who', deps=(1,))], [TraceDraft('who [A_1]')]):
        with pytest.raises((GeneratorError, TraceError)): raw.observe(raw.start(), 'Who?', ds, 1)

def test_what_was_thrown_away_is_still_paid_for():
    gen = usable(make(most=40, constrained=False), unknown=1.)
    ds,s = gen.generate(gen.start(), 'Who is the founder of the city?', 1)
    assert s.count==1 and gen.cost(s)['tokens']>0

def test_numbers_in_a_slot_do_not_become_references():
    tok,gen = vocabulary(),make(most=60)
    _,table = gen.scribe.prompt(r'who is [\A_300] and [\A_01] and [A_7] and [A_1234567890]', tok.start())
    one = lambda w: tok.first_slot+table.words.index(w)
    join,a,b = tok.id('[+]') if '[+]' in tok._fixed else None,tok._words['['],tok._words[']']
    for word,k,ok in (('A_300', 60, False), ('A_01', 60, False), ('A_7', 60, True), ('A_7', 5, False), ('A_1234567890', 60, False)):
        g = PlanGrammar(gen.lex, k, table, 60)
        for i in [gen.lex.id['[TRACE]'], *gen.scribe.number(k), gen.lex.id['[SubQ]'], tok._words['who'] if 'who' in tok._words else tok._words['Who'], a, join, one(word), join]: g.push(i)
        assert g.options()[b] and g.sound(b)==ok, word

def test_memory_lines_point_back_and_within_reach():
    tok = vocabulary(ids=8)
    s,t = Scribe(tok, Layout(memory=True)),vocabulary(ids=8).start()
    far,*_ = s.plan([TraceDraft('who')], 60, t, refs=[('who', 1)])
    assert tok.id('[REF]') not in far
    near,*_ = s.plan([TraceDraft('who')], 60, t, refs=[('who', 58)], memory=[['', 'who']])
    assert refused(Lexicon(s, tok.vocab_size), near, 60, t) is None or tok.unk in near
    for j in (60, 61, 0):
        with pytest.raises(TraceError): s.plan([TraceDraft('who')], 60, t, refs=[('who', j)])

def test_tags_stand_for_keys_and_only_the_runtime_writes_them():
    tok = vocabulary()
    s = Scribe(tok, Layout(memory=True, tags=True))
    lex,(_,t) = Lexicon(s, tok.vocab_size),s.prompt('who is Zorbo', tok.start())
    ids,kinds,t2 = s.plan([TraceDraft('who is Zorbo')], 1, t, memory=[['who', 'who is']])
    tag = t2.words.index(TAG+'who is')+tok.first_slot
    assert kinds[ids.index(tag)]==READ and ids.count(tag)==1 and refused(lex, ids, 1, t) is None
    again,*_,t3 = s.plan([TraceDraft('who is Zorbo')], 2, t2, refs=[('who is', 1)])
    assert again[again.index(tag)+1]==tok.id('[A_1]') and t3.words==t2.words and refused(lex, again, 2, t2) is None
    g = PlanGrammar(lex, 2, t2, 200)
    for i in again[:again.index(tag)]: g.push(i)
    assert g.queue==[tag] and not g.free[tag] and g.free[t2.words.index('Zorbo')+tok.first_slot]
    with pytest.raises(StreamError): g.push(tok.id('[A_1]'))
    with pytest.raises(CheckpointError, match='tags need'): Scribe(tok, Layout(tags=True))
    with pytest.raises(CheckpointError, match='tags need'): Scribe(build_slots(['a a'], extra=MEMORY_TOKENS), Layout(memory=True, tags=True))

def test_a_state_with_tags_goes_on_elsewhere():
    gen = make(Layout(memory=True, tags=True))
    s = gen.observe(gen.start(), 'who is Zorbo', [TraceDraft('who is Zorbo', 'Zorbo')], 1, memory=[['who', 'who is', 'what '*30+'is']])
    back = gen.from_bytes(gen.to_bytes(s))
    assert back.table==s.table and sum(w[:1]==TAG for w in s.table.words)==2 and all(len(w)<=64 for w in s.table.words)
    assert gen.generate(s, 'what is that', 2)[0]==gen.generate(back, 'what is that', 2)[0]

def test_an_equals_sign_is_a_word():
    tok = vocabulary()
    s = Scribe(tok, Layout(memory=True, tags=True))
    _,t = s.prompt('who is a = b', tok.start())
    g = PlanGrammar(Lexicon(s, tok.vocab_size), 1, t, 200)
    assert g.free[t.words.index('=')+tok.first_slot]

def test_a_free_plan_tags_what_stands_before():
    tok = vocabulary()
    s = Scribe(tok, Layout(memory=True, tags=True))
    lex,(_,t) = Lexicon(s, tok.vocab_size),s.prompt('who is Zorbo', tok.start())
    ids,_,after = s.plan([TraceDraft('who is Zorbo')], 1, t, memory=[['who', 'who is']])
    again,_,last = s.plan([TraceDraft('who is Zorbo')], 2, after, refs=[('who is', 1)], memory=[['who is the']])
    for k,x,t0,t1 in ((1, ids, t, after), (2, again, after, last)):
        f = FreePlan(lex, k, t0, 200)
        for i in x:
            assert not f.queue or f.queue[0]==i
            f.push(i)
        assert f.done and f.table.words==t1.words
    f = FreePlan(lex, 1, t, 200)
    for name in ('[MEM]', '[=]'): f.push(lex.id[name])
    assert f.queue==[tok.unk] and f.table==t                                 # nothing stands before

def test_more_tags_than_slots():
    tok = vocabulary(slots=3)
    gen,s = StreamGenerator(ssm(tok.vocab_size), Scribe(tok, Layout(memory=True, tags=True))),None
    s = gen.start()
    for k in range(1, 9): s = gen.observe(s, 'who is Zorbo', [TraceDraft('who is Zorbo')], k, memory=[[f'{a} {b}' for a in WORDS[:3] for b in WORDS[k:k+2]]])
    assert len(s.table.words)==3 and s.table.evicted>20
    valid(gen.generate(s, 'who is Zorbo', 9)[0], 9)

def nearby(tok, least=.9, asked=None):
    "Words of the same letters are alike."
    def encode(ws):
        if asked is not None: asked.append(list(ws))
        v = np.array([[w.count(c) for c in 'abcdefghijklmnopqrstuvwxyz'] for w in ws], float)
        return v/np.linalg.norm(v, axis=1, keepdims=True)
    return Nearby(tok, encode, least, 'letters')

def test_unknown_plain_words_are_read_as_known_ones():
    asked,gen,plain = [],make(Layout(memory=True)),make(Layout(memory=True))
    gen.nearby = nearby(gen.scribe.tok, asked=asked)
    for q,want in (('Who is the libaort of city?',)*2, ('Who reviR of the revir?', 'Who reviR of the river?'), ("Who revir's of re-vir?", "Who revir's of river?"), ('Revir REVIR',)*2, (r'[\A_1] [revir] \revir',)*2): assert gen.nearby(q)[0]==want
    assert [len(a) for a in asked][:1]==[len(gen.nearby.known)] and all(len(a)==1 for a in asked[1:]) and asked.count(['revir'])==1
    (ds,s),(es,t) = (g.generate(g.start(), q, 1) for g,q in ((gen, 'Which revir is the river?'), (plain, 'Which river is the river?')))
    assert ds==es and s.table==t.table and 'read "revir" as "river"' in gen.note(s) and 'read' not in plain.note(t)
    a,b = (g.observe(g.start(), q, [TraceDraft('who')], 1) for g,q in ((gen, 'Which revir?'), (plain, 'Which river?')))
    assert a.table==b.table
    assert gen.config['nearby']==dict(encoder='letters', least=.9) and 'nearby' not in plain.config and gen.identity==plain.identity

def test_nothing_is_near_to_nothing():
    tok = build_slots(['Who Where']*2, extra=MEMORY_TOKENS)
    assert nearby(tok)('who is that')==('who is that', {})

def test_white_space_bytes_are_no_sub_question():
    if 'CMTRAG_DATA' not in os.environ: pytest.skip('CMTRAG_DATA is not set')
    s = Scribe(NeoXTokenizer(Path(os.environ['CMTRAG_DATA'])/'tokenizer'/'20B_tokenizer.json'))
    lex = Lexicon(s, 50288)
    for ids in ([126, 243], [159, 211, 211], [126, 216]):
        g = PlanGrammar(lex, 1, None, 200)
        for i in [lex.id['[TRACE]'], *s.number(1), lex.id['[SubQ]'], *ids]: g.push(i)
        assert not g._text().strip() and not g.options()[lex.id['[KW]']]

def test_a_model_without_numbers_is_an_error():
    gen = make(most=40)
    g = PlanGrammar(gen.lex, 1, gen.start().table, 40)
    for bad in (np.nan, -np.inf):
        with pytest.raises(StreamError, match='no usable number'): g.choose(np.full(gen.lex.rows, bad))
    with pytest.raises(StreamError): g.push(gen.lex.id['[TRACE]']); g.push(gen.lex.id['[KW]'])

def test_sampling_is_seeded_and_bounded():
    runs = []
    for seed in (0, 0, 1):
        gen = make(most=40, pick=top_k(np.random.default_rng(seed)))
        runs.append([gen.generate(gen.start(), q, 1)[0] for q in QUESTIONS[:4]])
        for ds in runs[-1]: valid(ds, 1)
    assert runs[0]==runs[1]!=runs[2]

# the twin

@pytest.mark.parametrize('keep', [False, True])
def test_the_twin_is_the_same_generator_with_another_memory(keep):
    tok = vocabulary()
    torch.manual_seed(0)
    gen = StreamGenerator(TwinLM.fresh(twin_config(60_000, tok.vocab_size), keep=keep), Scribe(tok), 'transformer', most=40)
    ks,bad = hold(gen, 48, rows=4)
    assert bad==0
    s,k = gen.start(),1
    for q in QUESTIONS[:3]:
        ds,s = gen.generate(s, q, k)
        k += len(ds)
    a,sa = gen.generate(s, QUESTIONS[4], k)
    assert gen.generate(s, QUESTIONS[4], k)[0]==a
    back = gen.load(gen.dump(s))
    b,sb = gen.generate(back, QUESTIONS[4], k)
    assert a==b and sa.h.tokens==sb.h.tokens

def test_a_list_of_dependencies_ends():
    "A model that only wants to write more dependencies is stopped; what the sub-question uses still becomes one."
    from cmtrag.stream import MOST_DEPS
    tok = vocabulary()
    lex = Lexicon(Scribe(tok, Layout()), tok.vocab_size)
    numbers = [tok.id(f'[T_{k}]') for k in range(1, 120)]
    g = PlanGrammar(lex, 100, tok.start(), 512)
    for t in ('[TRACE]', '[T_100]', '[SubQ]', *(f'[A_{k}]' for k in range(80, 92)), '[KW]', '[DEP]'): g.push(tok.id(t))
    love = np.zeros(lex.rows); love[numbers] = 9.
    while g.state=='dep': g.push(g.choose(love.copy()))
    assert sorted(g.drafts[0].deps)[-12:]==list(range(80, 92)) and len(g.drafts[0].deps)<=MOST_DEPS+12, g.drafts[0].deps
    h = PlanGrammar(lex, 100, tok.start(), 512)
    for t in ('[TRACE]', '[T_100]', '[SubQ]', '[A_3]', '[KW]', '[DEP]'): h.push(tok.id(t))
    while h.state=='dep': h.push(h.choose(love.copy()))
    assert 3 in h.drafts[0].deps and len(h.drafts[0].deps)<=MOST_DEPS+1
