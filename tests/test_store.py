"""Sessions that last: whatever happens between two turns, what is stored is what was said. Undo, redo and forks against sessions in memory; processes that are
killed while they write; many sessions through one process and through four; files that are damaged, foreign, or from the future."""
import asyncio, base64, dataclasses, json, os, pickle, random, shutil, signal, sqlite3, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from cmtrag.dag import TraceDAG
from cmtrag.drafts import Fallback, Generator, GeneratorError, WholeQuery, query_draft
from cmtrag.llm import ScriptedLLM
from cmtrag.pipeline import Session, SessionBusy
from cmtrag.reader import Reader
from cmtrag.retrieval import HashEncoder, Index, Retriever
from cmtrag.sources import Corpus, Paragraph, paragraph_id
from cmtrag.store import SCHEMA, Store, StoreConflict, StoreError, _connect, _ready, pack_state, tensor_names, unpack_state
from cmtrag.traces import TraceDraft

# -- parts whose every output depends on all that was asked before ------------------------------------------------------

class Mixer(Generator):
    "One to three drafts, chosen by a state that every question changes; references to earlier answers among them."
    name = 'mixer'
    def __init__(self, key='1'): self.key = key
    def start(self): return np.zeros(256, np.float32)
    def generate(self, state, query, next_id):
        state = np.float32(.7)*np.roll(state, 1)+np.resize(np.frombuffer(query.encode('utf-8', 'replace'), np.uint8), 256).astype(np.float32)
        r = random.Random(state.tobytes())
        drafts = []
        for k in range(next_id, next_id+r.randint(1, 3)):
            dep = r.randint(1, k-1) if k>1 and r.random()<.7 else 0
            drafts.append(TraceDraft(f'What is thing {r.randint(0, 39)}' + (f' of [A_{dep}]?' if dep else '?'), f'thing {r.randint(0, 39)}', (dep,) if dep else ()))
        return drafts,state
    def dump(self, state): return base64.b64encode(save({'h': state}, metadata={'key': self.key})).decode()
    def load(self, d):
        b = base64.b64decode(d)
        if json.loads(b[8:8+int.from_bytes(b[:8], 'little')])['__metadata__']['key']!=self.key: raise GeneratorError('the state is of another checkpoint')
        return load(b)['h']

def say(prompt): return f'a{abs(hash_of(prompt))%9973}'
def hash_of(prompt): return int.from_bytes(__import__('hashlib').sha256(json.dumps(prompt).encode()).digest()[:6], 'big')

def make():
    paras = [Paragraph(paragraph_id(f'Thing {i}', x := f'Thing {i} belongs to thing {i*7%40} and was made in {1900+i}.'), f'Thing {i}', x) for i in range(40)]
    corpus = Corpus(paras)
    return Fallback(Mixer()),Retriever(Index.build(corpus, HashEncoder(128)), corpus),Reader(ScriptedLLM(say), prompt='chat')

USE = dict(k=3, window=2)
def questions(name, n): return [f'{name}: what of thing {i}?' for i in range(n)]
def outcome(t): return dataclasses.replace(t, seconds={})
def state(s): return [outcome(t) for t in s.turns],s.dag,[s.generator.dump(x) for x in s.states]

@pytest.fixture(scope='module')
def parts(): return make()

@pytest.fixture
def store(tmp_path):
    with Store(tmp_path/'s.sqlite') as s: yield s

def alone(parts, name, n):
    s = Session(*parts, **USE)
    for q in questions(name, n): s.ask(q)
    return s

# -- another process ----------------------------------------------------------------------------------------------------

def ask_until(path, names, n, kill=None, seed=0):
    "Open sessions over and over, ask each its next question, pass over those that somebody else is at; until each has `n` turns."
    parts,r = make(),random.Random(seed)
    with Store(path) as store:
        if kill:
            left = [int(kill[1])]
            def trace(sql):
                left[0] -= sql.startswith(kill[0])
                if left[0]==0: os.kill(os.getpid(), signal.SIGKILL)
            store.con.set_trace_callback(trace)
        todo,hops = set(names),0
        while todo:
            name = r.choice(sorted(todo))
            try:
                s = store.open(name, *parts, **USE)
                if len(s.turns)<n: s.ask(questions(name, n)[len(s.turns)]); hops += 1
                else: todo.discard(name)
            except (SessionBusy, StoreConflict): pass
    print(hops)

def start(*args):
    env = {**os.environ, 'PYTHONPATH': str(Path(__file__).resolve().parent.parent), 'PYTHONPYCACHEPREFIX': os.environ.get('PYTHONPYCACHEPREFIX', ''), 'OMP_NUM_THREADS': '1'}
    return subprocess.Popen([sys.executable, __file__, json.dumps(args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

# -- the same as in memory ----------------------------------------------------------------------------------------------

class InMemory:
    "What undo, redo and fork mean, on `Session`."
    def __init__(self, s): self.s,self.ahead = s,[]
    def ask(self, q): self.s.ask(q); self.ahead = []
    def undo(self): self.ahead.append((self.s.turns[-1], self.s.states[-1])); self.s.undo()
    def redo(self):
        t,x = self.ahead.pop()
        self.s.turns.append(t); self.s.states.append(x)
        for n,f in zip(t.nodes, t.looked_up): self.s.dag.append(n, f)

@pytest.mark.parametrize('seed', range(4))
def test_any_order_of_ask_undo_redo_fork(parts, store, seed):
    r = random.Random(seed)
    both = {'a': (store.open('a', *parts, **USE), InMemory(Session(*parts, **USE)))}
    for step in range(60):
        name = r.choice(sorted(both))
        s,m = both[name]
        do = r.choice(['ask']*4+['undo']*3+['redo']*3+['fork', 'reopen', 'break', 'delete', 'collect'])
        if do=='ask': q = f'{step} {r.random()}'; s.ask(q); m.ask(q)
        elif do=='undo' and m.s.turns: s.undo(); m.undo()
        elif do=='redo' and m.ahead: s.redo(); m.redo()
        elif do=='fork' and len(both)<6:
            n = r.randint(0, len(m.s.turns))
            both[f'f{step}'] = s.fork(n, f'f{step}'),InMemory(m.s.fork(n))
        elif do=='reopen': both[name] = Store(store.path).open(name, *parts, new=False, **USE),m
        elif do=='break':
            steps = s.stream('never mind')
            next(steps); steps.close()
        elif do=='delete' and len(both)>1:
            store.delete(name); del both[name]
            with pytest.raises(StoreError, match='deleted'): s.ask('x')
        elif do=='collect': store.collect()
        else:
            for what,ok in (('undo', m.s.turns), ('redo', m.ahead)):
                if do==what and not ok:
                    with pytest.raises(ValueError, match=f'nothing to {what}'): getattr(s, what)()
        if name in both: assert ([outcome(t) for t in both[name][0].turns],both[name][0].redoable)==([outcome(t) for t in m.s.turns],len(m.ahead))
    for name,(s,m) in both.items():
        again = Store(store.path).open(name, *parts, new=False, **USE)
        assert state(s)==state(m.s)==state(again) and again.redoable==len(m.ahead)
        assert [outcome(t) for t in store.turns(name)]==[outcome(t) for t in m.s.turns]
    assert {i.name: (i.turns, i.redoable) for i in store.sessions()}=={n: (len(m.s.turns), len(m.ahead)) for n,(_,m) in both.items()}
    store.collect()
    n = store.check()['turns']
    for name in both: store.delete(name)
    assert n>0 and store.check()==dict(sessions=0, turns=0, bytes=0)

def test_out_and_in(parts, store, tmp_path):
    s = store.open('a', *parts, **USE)
    for q in questions('a', 6): s.ask(q)
    s.undo(); s.undo()
    file = store.export('a', tmp_path/'a.session')
    assert [f.name for f in tmp_path.glob('*session*')]==['a.session']
    with Store(tmp_path/'other.sqlite') as other:
        assert other.import_(file, 'b')=='b' and other.import_(file)=='a'
        b = other.open('b', *parts, **USE)
        assert state(b)==state(s) and b.redoable==2
        b.redo(); s.redo()
        assert state(b)==state(s)
        for f in (lambda: other.import_(file), lambda: store.export('a', file), lambda: store.export('zzz', tmp_path/'z'), lambda: other.import_(tmp_path/'nowhere')):
            with pytest.raises(StoreError): f()
        assert other.check()['sessions']==2 and not (tmp_path/'z').exists()

def test_a_transcript_comes_in_whole(parts, store):
    m,s = alone(parts, 'a', 3),store.open('a', *parts, **USE)
    s.restore(m.turns, [m.generator.dump(x) for x in m.states[1:]])
    assert state(s)==state(m)
    with pytest.raises(StoreError, match='would be lost'): s.restore([], [])
    s.ask('more'); m.ask('more')
    assert state(Store(store.path).open('a', *parts, **USE))==state(m)

# -- many at once -------------------------------------------------------------------------------------------------------

def test_64_sessions_through_one_process(parts, store):
    names,turns,r = [f's{i}' for i in range(64)],3,random.Random(0)
    open_ = {n: store.open(n, *parts, **USE) for n in names}
    for n in r.sample(names*turns, 64*turns): open_[n].ask(questions(n, turns)[len(open_[n].turns)])
    for n in names: assert state(open_[n])==state(alone(parts, n, turns))

def through(path, parts, n, turns):
    names = [f's{i}' for i in range(n)]
    ps = [start('ask', str(path), names, turns, None, k) for k in range(4)]
    out = [p.communicate(timeout=600) for p in ps]
    assert [p.returncode for p in ps]==[0]*4, out
    hops = [int(o[0]) for o in out]
    assert sum(hops)==n*turns and sum(h>0 for h in hops)>1, hops
    with Store(path) as store:
        for x in names: assert state(store.open(x, *parts, new=False, **USE))==state(alone(parts, x, turns))
        assert store.check()['turns']==n*turns

def test_8_sessions_through_four_processes(parts, tmp_path): through(tmp_path/'s.sqlite', parts, 8, 3)

@pytest.mark.soak
def test_64_sessions_through_four_processes(parts, tmp_path): through(tmp_path/'s.sqlite', parts, 64, 8)

def test_two_writers_of_one_session(parts, store):
    a = store.open('a', *parts, **USE)
    b = Store(store.path).open('a', *parts, **USE)
    steps = a.stream('first')
    next(steps)
    for f in (lambda: b.ask('x'), lambda: b.store.delete('a')):
        with pytest.raises(SessionBusy, match='another process or window'): f()
    side = b.fork(name='side')
    assert side.ask('meanwhile').turn==1                      # another session runs beside it
    list(steps)
    for f in (lambda: b.ask('x'), lambda: b.restore([], [])):
        with pytest.raises(StoreConflict, match='moved on'): f()
    b.refresh()
    b.ask('second'); a.refresh()
    assert state(a)==state(b) and len(a.turns)==2

def test_async_and_cut_off(parts, store):
    s = store.open('a', *parts, **USE)
    async def go():
        await s.aask('one')
        steps = s.astream('two')
        await steps.__anext__()
        steps.close()
        return await s.aask('two')
    asyncio.run(go())
    assert [t.query for t in store.turns('a')]==['one', 'two'] and not s.busy

# -- killed -------------------------------------------------------------------------------------------------------------

POINTS = [('INSERT INTO node', 3), ('UPDATE session', 3), ('COMMIT', 6)]
MORE   = [(s, n) for s in ('INSERT INTO turn', 'INSERT INTO node', 'INSERT INTO state', 'UPDATE session', 'COMMIT', 'BEGIN IMMEDIATE') for n in (1, 2, 3, 4, 5)]
assert len(MORE)==30

def killed(path, parts, point):
    p = start('ask', str(path), ['a'], 5, point)
    err = p.communicate(timeout=120)[1]
    assert p.returncode==-signal.SIGKILL, err
    want = alone(parts, 'a', 5)
    with Store(path) as store:
        have = store.check()
        there = [i.name for i in store.sessions()]
        s = store.open('a', *parts, **USE)
        n = len(s.turns)
        assert have['turns']==n<=5 and not (there==[] and n)
        assert [outcome(t) for t in s.turns]==[outcome(t) for t in want.turns[:n]]
        for q in questions('a', 5)[n:]: s.ask(q)                 # nobody holds its lock any more
        assert state(s)==state(want)
    return n

@pytest.mark.parametrize('point', POINTS, ids=str)
def test_killed_while_a_turn_is_written(parts, tmp_path, point): killed(tmp_path/'s.sqlite', parts, point)

@pytest.mark.soak
@pytest.mark.parametrize('point', MORE, ids=str)
def test_killed_anywhere(parts, tmp_path, point): killed(tmp_path/'s.sqlite', parts, point)

def test_what_cannot_be_written_has_not_happened(parts, store):
    s = store.open('a', *parts, **USE)
    s.ask('one')
    before = state(s)
    for sql in ("CREATE TEMP TRIGGER t BEFORE INSERT ON node BEGIN SELECT raise(ABORT, 'no'); END", "CREATE TEMP TRIGGER t BEFORE UPDATE ON session BEGIN SELECT raise(ABORT, 'no'); END"):
        store.con.execute(sql)
        for f in (lambda: s.ask('two'), lambda: asyncio.run(s.aask('two'))):
            with pytest.raises(StoreError, match='nothing of this was stored'): f()
            assert state(s)==before and not s.busy
        store.con.execute('DROP TRIGGER t')
    assert store.check()['turns']==1 and s.ask('two').turn==2
    s.store._pid = 0
    with pytest.raises(StoreError, match='forked off'): s.ask('x')
    store._pid = os.getpid()
    store.close()
    with pytest.raises(StoreError, match='closed'): s.ask('x')

# -- what is refused ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def filled(parts, tmp_path_factory):
    path = tmp_path_factory.mktemp('filled')/'s.sqlite'
    with Store(path) as store:
        s = store.open('a', *parts, **USE)
        for q in questions('a', 4): s.ask(q)
        s.undo()
        s.fork(2, 'b').ask('half a pair \ud800, a zero \0 and\na line')
        want = {n: state(store.open(n, *parts, **USE)) for n in 'ab'}
    return path,want

def read(path, parts):
    "All that is stored, or the error."
    with Store(path) as store:
        store.check()
        return {n: state(store.open(n, *parts, new=False, **USE)) for n in 'ab'}

def test_sound(filled, parts): assert read(filled[0], parts)==filled[1]

def test_any_changed_byte_is_noticed_or_harmless(filled, parts, tmp_path):
    good,r,noticed = filled[0].read_bytes(),random.Random(0),0
    f = tmp_path/'s.sqlite'
    for _ in range(60):
        i = r.randrange(len(good))
        f.write_bytes(good[:i]+bytes([good[i]^(1<<r.randrange(8))])+good[i+1:])
        try: assert read(f, parts)==filled[1]
        except StoreError as e: noticed += 1; assert str(f) in str(e), e
    assert noticed>8                                             # much of a small file is empty space

def test_any_cut_is_noticed(filled, parts, tmp_path):
    good,f = filled[0].read_bytes(),tmp_path/'s.sqlite'
    for n in (1, 15, 60, 99, 100, 4000, 4096, 8192, len(good)//2, len(good)-4096, len(good)-1):
        f.write_bytes(good[:n])
        with pytest.raises(StoreError, match='move it away|damaged'): Store(f).open('a', *parts, **USE)
        assert f.read_bytes()==good[:n]
        with pytest.raises(StoreError): Store(tmp_path/'other.sqlite').import_(f)

class Evil:
    def __reduce__(self): return os.mkdir, (os.environ['EVIL'],)

def test_pickles_and_strangers(parts, filled, tmp_path, monkeypatch):
    monkeypatch.setenv('EVIL', str(tmp_path/'evil'))
    stranger = tmp_path/'db'
    con = sqlite3.connect(stranger)
    con.execute('CREATE TABLE x (y)'); con.commit(); con.close()
    good = filled[0].read_bytes()
    cases = [(pickle.dumps(Evil()), 'no session store'), (b'{"transcript": 1}', 'no session store'), (stranger.read_bytes(), 'another program'),
             (good[:60]+(SCHEMA+1).to_bytes(4, 'big')+good[64:], 'update cmtrag')]
    for b,what in cases:
        (f := tmp_path/'file').write_bytes(b)
        for use in (Store, Store(tmp_path/'mine').import_):
            with pytest.raises(StoreError, match=what) as e: use(f)
            assert str(f) in str(e.value) and f.read_bytes()==b
        f.unlink()
    assert not (tmp_path/'evil').exists()
    with pytest.raises(StoreError): Store(tmp_path)
    shutil.copy(filled[0], f := tmp_path/'trigger')
    con = sqlite3.connect(f)
    con.execute("CREATE TRIGGER t AFTER INSERT ON session BEGIN DELETE FROM turn; END"); con.commit(); con.close()
    for use in (Store, Store(tmp_path/'mine').import_):
        with pytest.raises(StoreError, match='tables are not those'): use(f)

def test_a_state_that_is_a_pickle(parts, filled, tmp_path, monkeypatch):
    "Also with seals that match: whoever forged the file could compute those."
    from cmtrag import store as m
    monkeypatch.setenv('EVIL', str(tmp_path/'evil'))
    shutil.copy(filled[0], f := tmp_path/'s.sqlite')
    blob = pickle.dumps(Evil())
    with Store(f) as s, s._transaction(write=True) as con:
        t = con.execute("SELECT head FROM session WHERE name='b'").fetchone()[0]
        con.execute('UPDATE state SET data=?, hash=? WHERE turn=? AND part=1', (blob, m._hash(blob), t))
        monkeypatch.setattr(m, 'seal', lambda *a: 'x'); con.execute("UPDATE turn SET seal='x'")
    with pytest.raises(StoreError, match='s.sqlite'): Store(f).open('b', *parts, **USE)
    assert not (tmp_path/'evil').exists() and tensor_names(blob) is None

def test_other_checkpoints_generators_documents(parts, filled):
    with Store(filled[0]) as store:
        few = Corpus([parts[1].corpus[i] for i in parts[1].corpus.ids[:1]])
        for p,what in (((Fallback(Mixer('2')), *parts[1:]), 'another checkpoint'), ((WholeQuery(), *parts[1:]), "held with the generator 'mixer'"),
                       ((parts[0], Retriever(Index.build(few, HashEncoder(128)), few), parts[2]), 'not in this corpus')):
            with pytest.raises(StoreError, match=what) as e: store.open('a', *p, new=False, **USE)
            assert 's.sqlite' in str(e.value)
        with pytest.raises(StoreError, match='there are b, a|there are a, b'): store.open('c', *parts, new=False)
        with pytest.raises(StoreError, match='already'): store.open('a', *parts, new=True)
        for bad in ('', ' a', 'a\n', 'x'*81, '\ud800', 3):
            with pytest.raises(StoreError, match='cannot be called'): store.open(bad, *parts)
    assert read(filled[0], parts)==filled[1]

def test_a_later_schema(filled, parts, tmp_path):
    "The way from one version to the next, with a made-up second one; a step that fails leaves the first."
    shutil.copy(filled[0], f := tmp_path/'s.sqlite')
    con = _connect(f)
    with pytest.raises(sqlite3.Error): _ready(con, f, SCHEMA+1, {SCHEMA: ['ALTER TABLE session ADD COLUMN note TEXT', 'nonsense']})
    con.close()
    assert read(f, parts)==filled[1]
    con = _connect(f)
    _ready(con, f, SCHEMA+1, {SCHEMA: ['ALTER TABLE session ADD COLUMN note TEXT', "UPDATE session SET note='kept'"]})
    assert [n for n, in con.execute('SELECT note FROM session')]==['kept']*2
    con.close()
    with pytest.raises(StoreError, match='newer cmtrag'): Store(f)
    assert read(f.with_name(f'{f.name}.schema{SCHEMA}'), parts)==filled[1]          # the copy that was put beside it

# -- the trained generator ----------------------------------------------------------------------------------------------

def test_the_trained_generator(parts, store):
    from cmtrag.profiles import load_profile, make_trace_generator
    gen = make_trace_generator(load_profile('small'))
    p = gen,*parts[1:]
    s,m,qs = store.open('a', *p, **USE),Session(*p, **USE),['Who founded thing 3?', 'Where was that person born?', 'In which country is that city?']
    for q in qs[:2]: s.ask(q); m.ask(q)
    s = Store(store.path).open('a', *p, **USE)
    s.ask(qs[2]); m.ask(qs[2])
    assert state(s)[:2]==state(m)[:2]
    def same(x): return {k: v.tolist() for k,v in load(pack_state(gen.dump(x))[1]).items()},x.inner.table,x.inner.tokens,x.count  # the order of a file's fields is chance
    assert [same(x) for x in s.states]==[same(x) for x in m.states]
    dumped = s.dump_state()
    packed = pack_state(dumped)
    assert len(packed)==2 and tensor_names(packed[1]) and unpack_state(packed)==dumped
    gen.inner.revision = 'retrained'
    with pytest.raises(StoreError, match='another generator'): store.open('a', *p, **USE)

if __name__=='__main__':
    what,*args = json.loads(sys.argv[1])
    ask_until(*args)
