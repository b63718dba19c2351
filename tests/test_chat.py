"Steps, asynchronous turns and the chat: the same turns as `ask`, whole or not at all, and every paragraph shown is cited."
import asyncio, dataclasses, json, os, random, re, sys, threading, time
from html.parser import HTMLParser

import pytest

from cmtrag.chat import Chat, ChatError, answer_in, citation, dag_links, dag_text, index_documents, numbers, plain, read_documents, turn_record, turn_text
from cmtrag.dag import TraceDAG
from cmtrag.documents import DocumentError
from cmtrag.experiment import eval_dialogues, eval_source
from cmtrag.drafts import GoldGenerator, WholeQuery
from cmtrag.llm import LLMError, ScriptedLLM
from cmtrag.pipeline import Session, SessionBusy
from cmtrag.reader import Reader
from cmtrag.retrieval import HashEncoder, Index, Retriever
from cmtrag.sources import Corpus, make_paragraph
from cmtrag.traces import TraceError, TraceNode
from cmtrag.widgets import ChatPanel, Rehearsed, resolved_html

def outcome(t): return dataclasses.replace(t, seconds={})
def state(s): return list(map(outcome, s.turns)),list(s.states),s.dag.copy(),s.busy

@pytest.fixture(scope='module')
def world():
    data = eval_dialogues(eval_source('world', 'dev', size='tiny'), 'dev', 8)
    return data,Retriever(Index.build(data.corpus, HashEncoder(256)), data.corpus)

def answerer(d):
    "Gold answers to resolved sub-questions; what the turn asks gets the last step's answer."
    def say(prompt):
        text = prompt[-1]['content']
        return re.findall(r'^\d+\. .*? (\S+)$', text, re.M)[-1] if 'Reasoning steps' in text else next((t.answer for t in reversed(d.traces) if t.draft.sub_question.split('[A_')[0][:25] in text), 'unknown')
    return Reader(ScriptedLLM(say), prompt='chat')

def new(world, d, reader=None): return Session(GoldGenerator(d), world[1], reader or answerer(d), k=3)

def test_stream_is_ask(world):
    for d in world[0].dialogues:
        a,b = new(world, d),new(world, d)
        for q in d.queries:
            turn,steps = a.ask(q),list(b.stream(q))
            assert outcome(steps[-1].turn)==outcome(turn)
            assert [s.kind for s in steps]==['plan', *['evidence', 'answer']*len(turn.nodes), 'turn']
            assert [s.node for s in steps if s.kind=='answer']==list(turn.nodes)
            shown = [s for s in steps if s.kind=='evidence']
            assert [tuple(p.id for p,_ in s.paragraphs) for s in shown]==list(turn.context) and [s.reused for s in shown]==list(turn.reused)
            assert sum((s.notes for s in steps), ())==turn.notes
        assert a.dag==b.dag

def test_broken_off_anywhere(world):
    "However far a turn has come, leaving it leaves nothing behind; the next `ask` is as if nothing had been."
    d = max(world[0].dialogues, key=lambda d: len(d.turns))
    whole,s = new(world, d),new(world, d)
    for q in d.queries[:4]:
        n,before = len(list(s.fork().stream(q))),state(s)
        for i in range(n-1):
            steps = s.stream(q)
            for _ in range(i+1): next(steps)
            assert s.busy
            for other in (lambda: s.ask('x'), lambda: next(s.stream('x')), s.undo, lambda: s.restore([], [])) if s.turns else ():
                with pytest.raises(SessionBusy, match='under way'): other()
            steps.close()
            assert state(s)==before
        assert outcome(s.ask(q))==outcome(whole.ask(q))

@pytest.mark.parametrize('error', [LLMError('gone'), KeyboardInterrupt(), MemoryError()])
def test_failed_anywhere(world, error):
    d = world[0].dialogues[0]
    good = answerer(d)
    n,at = [0],[0]
    def say(prompt):
        n[0] += 1
        if n[0]==at[0]: raise error
        return good.llm.script(prompt)
    s,whole = new(world, d, Reader(ScriptedLLM(say), prompt='chat')),new(world, d)
    for q in d.queries[:3]:
        calls,before = len(whole.fork().ask(q).nodes)+1,state(s)
        for k in range(1, calls+1):
            n[0],at[0] = 0,k
            with pytest.raises(type(error)): s.ask(q)
            assert state(s)==before
        at[0] = 0
        assert outcome(s.ask(q))==outcome(whole.ask(q))

def test_async_side_by_side(world):
    "Eight conversations on one event loop, steps and whole turns mixed, give what `ask` gives; the loop goes on meanwhile."
    ticks = 0
    async def clock():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)
    async def hold(i, d):
        s,out = new(world, d),[]
        for q in d.queries: out.append(await s.aask(q) if i%2 else [x async for x in s.astream(q)][-1].turn)
        return out
    async def go():
        t = asyncio.create_task(clock())
        try: return await asyncio.gather(*(hold(i, d) for i,d in enumerate(world[0].dialogues)))
        finally: t.cancel()
    got = asyncio.run(go())
    for d,ts in zip(world[0].dialogues, got):
        s = new(world, d)
        assert [outcome(t) for t in ts]==[outcome(s.ask(q)) for q in d.queries]
    assert ticks>100

def test_cancelled_anywhere(world):
    "A turn cancelled inside its k-th model call: free at once, unchanged for good, also when the call comes back later."
    d = next(d for d in world[0].dialogues if len(d.turns[0].traces)>1)
    inner,gate,entered,n,at = answerer(d),threading.Event(),threading.Event(),[0],[0]
    def say(prompt):
        n[0] += 1
        if n[0]==at[0]:
            entered.set()
            assert gate.wait(10)
        return inner.llm.script(prompt)
    s = new(world, d, Reader(ScriptedLLM(say), prompt='chat'))
    async def once(k):
        gate.clear(); entered.clear()
        n[0],at[0] = 0,k
        before,task = state(s),asyncio.create_task(s.aask(d.queries[0]))
        await asyncio.to_thread(entered.wait, 10)
        assert s.busy
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
        assert state(s)==before
        gate.set()
        await asyncio.sleep(.05)
        assert state(s)==before
    async def go():
        for k in range(1, len(d.turns[0].traces)+2): await once(k)
        at[0] = 0
        it = s.astream(d.queries[0])
        await it.__anext__()
        await it.aclose()
        assert not s.busy and [x async for x in it]==[]
        return await s.aask(d.queries[0])
    assert outcome(asyncio.run(go()))==outcome(new(world, d).ask(d.queries[0]))

def test_every_paragraph_is_cited(world):
    "Text and JSON of a turn cite just the paragraphs that the reader saw, and say of each reused one where it came from."
    reused = 0
    for d in world[0].dialogues:
        chat = Chat(new(world, d))
        for q in d.queries:
            text,turn = chat.say(q),chat.session.turns[-1]
            cites = re.findall(r'^\[(\d+)\] ', text, re.M)
            assert cites==[str(i+1) for i in range(len(turn.para_ids))]
            assert set(re.findall(r'\[(\d+)\]', text.partition('\n\n')[0]))==set(cites)
            rec = turn_record(chat, turn)
            assert [e['id'] for e in rec['evidence']]==list(turn.para_ids) and rec==json.loads(json.dumps(rec))
            for t,n,r in zip(rec['traces'], turn.nodes, turn.reused):
                assert len(t['reused'])==len(r)
                for why in t['reused'].values():
                    via = [int(k) for k in re.findall(r'T(\d+)', why)]
                    assert via and set(via) <= {*n.deps, t['looked_up']}
                reused += len(r)
            body = turn_text(chat.corpus, chat.session.dag, turn)
            assert text.endswith(body) if len(turn.nodes)>1 else text==body
    assert reused>10

def test_drawings_can_be_read_back():
    r = random.Random(0)
    for _ in range(300):
        dag,turn = TraceDAG(),1
        for k in range(1, r.randint(2, 14)):
            turn += r.random()<.5
            deps = tuple(sorted(r.sample(range(1, k), min(k-1, r.choice([0,1,1,2,3])))))
            found = r.choice([d for d in range(1, k) if d not in deps]) if r.random()<.2 and len(deps)<k-1 else None
            dag.append(TraceNode(k, turn, f'question {k}', '', deps, (), f'answer {k}'), found)
        assert dag_links(dag_text(dag))=={(a,b) for a,b,_ in dag.links()}

def test_hostile_documents(tmp_path):
    "Nothing in a document, a file name, a question or an answer reaches the terminal as a control sequence."
    (tmp_path/'docs').mkdir()
    (tmp_path/'docs'/'a.md').write_text('# Red\x1b[31m\u202e title [1] [T_1]\n\nThe word \x1b]0;owned\x07 is [A_1] [PLAN].\n', encoding='utf-8')
    (tmp_path/'docs'/'b\x1b[2Jc.md').write_text('# B\n\nAnother word.\n', encoding='utf-8')
    docs,home = read_documents(tmp_path/'docs', tmp_path/'ix')
    got  = index_documents(docs, HashEncoder(64), home)
    chat = Chat(Session(WholeQuery(), Retriever(got.index, docs.corpus), Reader(ScriptedLLM(lambda p: 'the word \x1b[2J\u2067'), prompt='chat'), k=5), docs)
    said = '\n'.join([chat.say('Which \x1b[31mword is [A_7]?'), chat.say('/dag'), chat.say('/dag mermaid'), chat.say('/show 1'), chat.say('/show 2'), str(got)])
    assert plain(said)==said and '\x1b' not in said
    with pytest.raises(ChatError) as e: chat.say('/\x1b[2J')
    assert '\x1b' not in str(e.value)

@pytest.mark.parametrize('change', [lambda d: d.update(transcript=0), lambda d: d.pop('states'), lambda d: d['states'].pop(), lambda d: d['turns'][0].pop('query'), lambda d: d['turns'][0]['nodes'][0].update(id=5),
                                    lambda d: d['turns'][1]['nodes'][0].update(deps=[99]), lambda d: d['turns'].reverse(), lambda d: d.update(states=['x']*3), lambda d: d['turns'][0].update(context=[['p0']]),
                                    lambda d: d['turns'][0].update(looked_up=[]), lambda d: d['turns'][0].update(context=[], reused=[]), lambda d: d['turns'][1].update(turn=7), lambda d: d['turns'][0]['nodes'][0].update(turn=3),
                                    lambda d: d['turns'][0].update(seconds={'plan': 'x'}), lambda d: d.update(turns=d['turns'][1:], states=d['states'][1:]), lambda d: d['turns'][0].update(nodes=7), lambda d: d.update(turns=[1, 2, 3])])
def test_changed_transcripts(world, tmp_path, change):
    "A transcript that was tampered with is refused, and the conversation under way stays."
    d = world[0].dialogues[0]
    chat,file = Chat(new(world, d)),tmp_path/'talk.json'
    for q in d.queries[:3]: chat.say(q)
    chat.save(file)
    saved = json.loads(file.read_text(encoding='utf-8'))
    change(saved)
    file.write_text(json.dumps(saved), encoding='utf-8')
    before = state(chat.session)
    with pytest.raises(ChatError): chat.load(file)
    assert state(chat.session)==before

def test_transcripts_go_on(world, tmp_path):
    "Saved and loaded at every turn, by another chat: the same conversation."
    d = world[0].dialogues[0]
    whole,part = Chat(new(world, d)),Chat(new(world, d))
    for q in d.queries:
        whole.say(q); part.say(q)
        part.save(tmp_path/'t.json')
        part = Chat(new(world, d))
        part.load(tmp_path/'t.json')
        assert state(part.session)==state(whole.session)

def test_restore_looks_before_it_changes(world):
    "Turns and states that do not fit together are refused by the session itself, whoever calls."
    d = world[0].dialogues[0]
    whole = new(world, d)
    for q in d.queries[:2]: whole.ask(q)
    states = [whole.generator.dump(x) for x in whole.states[1:]]
    s = new(world, d)
    s.ask(d.queries[0])
    before = state(s)
    for ts,ss in ((whole.turns, states[:1]), (whole.turns[1:], states[1:]), (whole.turns[::-1], states), ([dataclasses.replace(whole.turns[0], reused=())], states[:1])):
        with pytest.raises(TraceError): s.restore(ts, ss)
        assert state(s)==before
    s.restore(whole.turns, states)
    assert list(map(outcome, s.turns))==list(map(outcome, whole.turns))

# -- a turn that is stopped -------------------------------------------------------------------------------------------

def test_closed_before_the_first_step(world):
    d = world[0].dialogues[0]
    s = new(world, d)
    async def go():
        steps = s.astream(d.queries[0])
        steps.close()
        return [x async for x in steps],steps.turn
    before = state(s)
    assert asyncio.run(go())==([], None) and state(s)==before

def test_stopped_at_any_moment(world):
    "A turn that is closed from another thread is in, or it is not; the stream says which, and it stays so."
    d,r,seen = world[0].dialogues[0],random.Random(0),set()
    async def once(): await new(world, d).aask(d.queries[0])
    t0 = time.perf_counter()
    for _ in range(5): asyncio.run(once())
    whole = (time.perf_counter()-t0)/5
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(150):
            s = new(world, d)
            steps = s.astream(d.queries[0])
            async def go():
                async for _ in steps: pass
            t = threading.Thread(target=asyncio.run, args=(go(),))
            t.start()
            time.sleep(r.random()*3*whole)
            steps.close()
            said = steps.turn
            t.join()
            assert steps.turn is said and s.turns==([said] if said else []) and not s.busy and len(s.states)==len(s.turns)+1
            seen.add(said is not None)
    finally: sys.setswitchinterval(old)
    assert seen=={True, False}

def test_no_close_between_look_and_entry(world, monkeypatch):
    "The thread that hands the last step out is held up: a close in that moment waits, and tells the truth."
    d,entered = world[0].dialogues[0],threading.Event()
    inner = Session._hand_out
    def slow(self, rec, step, st):
        if step.turn:
            entered.set()
            time.sleep(.2)
        return inner(self, rec, step, st)
    monkeypatch.setattr(Session, '_hand_out', slow)
    p = ChatPanel(new(world, d))
    turn = p.start(d.queries[0])
    entered.wait(10)
    p.stop()
    turn.thread.join(10)
    assert turn.over and len(p.session.turns)==len(p.here.steps)==(turn.error is None)

def test_panel_and_session_agree(world):
    "Stopped at any moment, asked and undone by another hand: the panel shows the session, and undo takes back what is there."
    d,r = world[0].dialogues[0],random.Random(1)
    p = ChatPanel(new(world, d))
    for i in range(40):
        q = d.queries[len(p.session.turns)] if len(p.session.turns)<len(d.queries) else None
        do = r.choice(['stop', 'stop', 'ask', 'outside', 'undo', 'undo outside']) if q else 'undo'
        if do=='stop':
            t = p.start(q)
            time.sleep(r.random()*.01)
            p.stop()
            t.thread.join(10)
            assert (t.error is None)==(t.stream.turn is not None)
        elif do=='ask': assert p.ask(q) is p.session.turns[-1]
        elif do=='outside': p.session.ask(q)
        elif p.session.turns: (p.undo if do=='undo' else p.session.undo)()
        page = p.html()
        assert [x[-1].turn for x in p.here.steps]==p.session.turns and page.count('class="cm-query"')==len(p.session.turns)
    while p.session.turns: p.undo()
    with pytest.raises(ValueError, match='nothing to undo'): p.undo()

# -- files ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['~no-such-user-here/x.json', 'x'*300, 'a\0b', 'none/x.json', '.', '/', '\udcff'*300, '\ud800'])
def test_file_names_of_all_kinds(world, tmp_path, monkeypatch, name):
    "A name that can be none is an error of the command, never the end of the conversation."
    monkeypatch.chdir(tmp_path)
    d = world[0].dialogues[0]
    chat = Chat(new(world, d))
    chat.say(d.queries[0])
    before = state(chat.session)
    for c in ('/save', '/load'):
        with pytest.raises(ChatError): chat.say(f'{c} {name}')
    assert state(chat.session)==before and not list(tmp_path.iterdir())
    chat.say(d.queries[1])

def test_autosave(world, tmp_path, monkeypatch):
    "What no file holds is kept, once; what one holds is not written again."
    monkeypatch.setenv('CMTRAG_CACHE', str(tmp_path/'cache'))
    d = world[0].dialogues[0]
    chat = Chat(new(world, d))
    assert chat.autosave() is None
    chat.say(d.queries[0])
    file = chat.autosave()
    assert file.is_relative_to(tmp_path/'cache') and chat.autosave() is None
    again = Chat(new(world, d))
    again.load(file)
    assert state(again.session)==state(chat.session) and again.autosave() is None
    again.say(d.queries[1])
    again.save(tmp_path/'t.json')
    assert again.autosave() is None
    again.say('/undo')
    assert again.autosave() is not None

@pytest.mark.parametrize('text', ['[', '{"transcript": 1}', '['*100_000, '{"transcript": 1, "turns": 1, "states": 2}', '\ufeff{}', ''])
def test_files_that_are_no_transcripts(world, tmp_path, text):
    (tmp_path/'t.json').write_text(text, encoding='utf-8')
    chat = Chat(new(world, world[0].dialogues[0]))
    with pytest.raises(ChatError): chat.load(tmp_path/'t.json')
    with pytest.raises(ChatError, match='choose another name'): chat.save(tmp_path/'t.json')
    assert (tmp_path/'t.json').read_text(encoding='utf-8')==text

@pytest.mark.parametrize('there', ['html', 'json'])
def test_a_page_over_nothing_foreign(world, tmp_path, there):
    p = ChatPanel(new(world, world[0].dialogues[0]), folder=tmp_path)
    (tmp_path/f'x.{there}').write_text('<html>mine</html>')
    with pytest.raises(ChatError, match='choose another name'): p.save('x')
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()]==[(f'x.{there}', '<html>mine</html>')]
    p.save('y')
    p.save('y')

# -- one place, one folder --------------------------------------------------------------------------------------------

def folder(p, **files):
    p.mkdir()
    for n,t in files.items(): (p/f'{n}.md').write_text(f'# {n}\n\n{t}\n', encoding='utf-8')
    return p

class Named(HashEncoder):
    def __init__(self, name, dim=64):
        super().__init__(dim)
        self.name = name

def test_two_folders_in_one_place(tmp_path):
    a,b,home = folder(tmp_path/'a', x='One text.'),folder(tmp_path/'b', y='Another text.'),tmp_path/'ix'
    index_documents(read_documents(a, home)[0], HashEncoder(64), home)
    there = sorted(home.rglob('*'))
    with pytest.raises(DocumentError, match=f'another folder, {re.escape(str(a))}; name another place'): read_documents(b, home)
    with pytest.raises(DocumentError, match='another folder'): index_documents(read_documents(b, tmp_path/'other')[0], HashEncoder(64), home)
    assert sorted(home.rglob('*'))==there
    assert index_documents(read_documents(a, home)[0], HashEncoder(64), home).index.encoded==0

def test_encoders_share_a_place(tmp_path):
    "An edit removes the earlier index of the same encoder, dimension and revision, and no other's."
    a,home = folder(tmp_path/'a', x='One text.'),tmp_path/'ix'
    encoders = [Named('minilm'), Named('minilm-bfloat16'), Named('minilm', 32), Named('mini')]
    for e in encoders: index_documents(read_documents(a, home)[0], e, home)
    (a/'z.md').write_text('# Z\n\nA third text.\n', encoding='utf-8')
    index_documents(read_documents(a, home)[0], encoders[0], home)
    assert len(list(home.glob('*/manifest.json')))==4
    for e in encoders[1:]: assert index_documents(read_documents(a, home)[0], e, home).index.taken_over==1
    assert len(list(home.glob('*/manifest.json')))==4

def test_who_waits_is_told(tmp_path, capsys):
    from filelock import FileLock
    a,home = folder(tmp_path/'a', x='One text.'),tmp_path/'ix'
    docs = read_documents(a, home)[0]
    home.mkdir()
    held,free = threading.Event(),threading.Event()
    def other():
        with FileLock(home/'index.lock'):
            held.set()
            free.wait(10)
    t = threading.Thread(target=other)
    t.start()
    held.wait(10)
    threading.Timer(1.5, free.set).start()
    assert len(index_documents(docs, HashEncoder(64), home).index)==1
    t.join()
    assert 'another cmtrag is indexing this folder' in capsys.readouterr().err
    index_documents(docs, HashEncoder(64), home)
    assert 'another cmtrag' not in capsys.readouterr().err

# -- what is shown ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('answer', ['no', 'No.', 'yes', 'YES'])
def test_yes_and_no_have_no_words_to_cite(answer):
    c = Corpus([make_paragraph('Note', 'There is no other. Yes, really.'), make_paragraph('Yes', 'No.')])
    assert answer_in(c, c.ids, answer)==[]
    assert len(answer_in(c, c.ids, 'no other'))==1

def test_bytes_that_are_no_text(world):
    "A question as a shell hands it on when its bytes are no UTF-8."
    chat = Chat(Session(WholeQuery(), world[1], Reader(ScriptedLLM(lambda p: str(p).encode('utf-8') and 'x'), prompt='chat')))
    chat.say(os.fsdecode(b'Who owns the caf\xe9?'))
    assert chat.session.turns[0].query=='Who owns the caf\ufffd?'

def test_marks_in_answers_are_text():
    class Balance(HTMLParser):
        depth = 0
        def handle_starttag(self, tag, attrs): self.depth += 1
        def handle_endtag(self, tag):
            self.depth -= 1
            assert self.depth>=0
    for a in ('\ue000', '\ue001', 'a\ue001b\ue000', '<u>', ''):
        for q in ('Who [A_1]?', '\ue000 [A_1]', '[A_1]\ue001[A_1]'):
            b,h = Balance(),resolved_html(q, {1: a})
            b.feed(h)
            assert b.depth==0 and h.count('<u>')==q.count('[A_1]')

def test_a_rehearsal_hands_everything_on(world):
    "Cost, note and observed turns are those of the generator that planned."
    class Paid(WholeQuery):
        name = 'paid'
        def start(self): return ()
        def generate(self, state, query, next_id): return super().generate(None, query, next_id)[0],state+(query,)
        def observe(self, state, query, drafts, next_id): return state+(f'seen {query}',)
        def cost(self, state): return dict(calls=3, tokens=70)
        def note(self, state): return 'a fallback'
        def dump(self, state): return list(state)
        def load(self, d): return tuple(d)
    d = world[0].dialogues[0]
    g = Rehearsed(d, Paid())
    s = Session(g, world[1], answerer(d), k=2)
    a,b = s.ask(d.queries[0]),s.ask('Something else?')
    assert a.calls['generator']==1 and 'a fallback' not in a.notes
    assert b.calls['generator']==3 and b.calls['tokens']>=70 and 'a fallback' in b.notes
    assert s.states[-1].inner==(f'seen {d.queries[0]}', 'Something else?')
    st = g.observe(g.start(), d.queries[0], [t.draft for t in d.turns[0].traces], 1)
    assert g.proposal(st)==d.queries[1] and st.ids==tuple(range(1, len(d.turns[0].traces)+1)) and g.load(g.dump(st))==st
    assert g.proposal(g.observe(g.start(), 'Else?', [], 1))==d.queries[0]
