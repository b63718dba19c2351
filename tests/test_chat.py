"Steps, asynchronous turns and the chat: the same turns as `ask`, whole or not at all, and every paragraph shown is cited."
import asyncio, dataclasses, json, random, re, threading

import pytest

from cmtrag.chat import Chat, ChatError, citation, dag_links, dag_text, index_documents, numbers, plain, read_documents, turn_record, turn_text
from cmtrag.dag import TraceDAG
from cmtrag.experiment import eval_dialogues, eval_source
from cmtrag.generator import GoldGenerator, WholeQuery
from cmtrag.llm import LLMError, ScriptedLLM
from cmtrag.pipeline import Session, SessionBusy
from cmtrag.reader import Reader
from cmtrag.retrieval import HashEncoder, Index, Retriever
from cmtrag.traces import TraceNode

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
                                    lambda d: d['turns'][1]['nodes'][0].update(deps=[99]), lambda d: d['turns'].reverse(), lambda d: d.update(states=['x']*3), lambda d: d['turns'][0].update(context=[['p0']])])
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
