/* The ring's protocol for spin, which tries every interleaving: a producer that commits with its own
 * hands or through a GPU, and two consumers, of which one at a time holds the ring. A kill -9 may
 * come between any two steps of the producer and of the first consumer; the GPU may go on for a while.
 *
 *     spin -a csrc/ring.pml && cc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -E -n
 *     spin -a -DBREAK_COMMIT csrc/ring.pml …    must find the fault, as with every other BREAK_
 *
 * tests/test_ring_model.py does both. Beside each statement stands the code that it stands for, by
 * file and words; the test looks for those words there. Not in the model: memory order (TSan, on
 * ring_test), bytes that somebody else bends (ring_fuzz), rings of more than CAP units of 64 bytes
 * and runs of more than RECORDS records. A record has up to half of the ring, as
 * RingWriter::max_payload_bytes wants it; its first unit is the header.
 */
#define CAP 4
#define RECORDS 3
#define NONE 255
#define PAD 254

#define PENDING 0 /* ring_layout.h: kPending = 0 */
#define COMMITTED 1
#define ABANDONED 2
#define PADDING 0 /* ring_layout.h: kPadding = 0 */
#define ROWS 1

#define AT(p) ((p) % CAP)

/* The file. Payload is as bad as can be: it looks like a committed header. */
byte ready[CAP], kind[CAP], units[CAP], seq[CAP], body[CAP];
byte head, tail;
bool named = true;    /* it has its name */
bool producer = true; /* the producer lives and holds its lock */
byte consumer = NONE; /* who holds the consumer's lock */

bool killed[2];                                /* the consumers */
chan copies = [RECORDS] of {byte, byte, byte}; /* the copy stream: position, units, seq */

/* What the code does not have, and the assertions need. */
byte owner[CAP] = NONE; /* the record that a unit belongs to until it is freed */
bool published[RECORDS], seen[RECORDS], torn[RECORDS];
bool over; /* nothing is reserved any more: what a copy still writes, nobody reads */

/* No record is lost: a consumer has seen it, or named it as torn. */
inline all_seen() {
  i = 0;
  do
  :: i < RECORDS -> assert(!published[i] || seen[i] || torn[i]); i++
  :: else -> break
  od;
  i = 0
}

/* Nothing is overwritten while it is unread. */
inline own(position, n, who) {
  i = 0;
  do
  :: i < n -> assert(owner[AT(position + i)] == NONE); owner[AT(position + i)] = who; i++
  :: else -> break
  od;
  i = 0
}

/* The payload, then the ready word. */
inline fill(at, n, s) {
#ifdef BREAK_COMMIT
  ready[AT(at)] = COMMITTED;
#endif
  if
  :: d_step {
       n == 2 ->
       assert(owner[AT(at + 1)] == s || over || !producer);
       body[AT(at + 1)] = s; /* copier.cpp: cuMemcpyDtoHAsync */
       ready[AT(at + 1)] = COMMITTED; kind[AT(at + 1)] = ROWS;
       units[AT(at + 1)] = 1; seq[AT(at + 1)] = s
     }
  :: n != 2
  fi;
  ready[AT(at)] = COMMITTED /* ring_writer.cpp: store_release<uint32_t>(&file_->map->record(slot.position)->ready */
}

#define PADDING_BEFORE (n <= CAP - AT(my_head) -> 0 : CAP - AT(my_head)) /* ring_writer.cpp: const uint64_t padding = record_bytes <= room ? 0 : room */
#ifdef BREAK_ROOM
#define FITS (my_head + n - my_tail <= CAP)
#else
#define FITS (my_head + PADDING_BEFORE + n - my_tail <= CAP) /* ring_writer.cpp: const uint64_t end = head_ + padding + record_bytes */
#endif

active proctype Producer() {
  byte my_head, my_tail, s, n, pad, at, i;
  {
    do
    :: d_step { s < RECORDS && !n -> n = 1 }
    :: d_step { s < RECORDS && !n -> n = 2 }
    :: d_step { n && !FITS && my_tail != tail -> my_tail = tail } /* ring_writer.cpp: load_acquire(&file_->map->header()->tail) */
#ifdef BREAK_PUBLISH
    :: n && FITS -> d_step { head = my_head + PADDING_BEFORE + n; published[s] = true }
      d_step {
#else
    :: d_step {
        n && FITS ->
#endif
        pad = PADDING_BEFORE;
        at = my_head + pad;
        own(my_head, pad, PAD);
        own(at, n, s);
        if
        :: pad -> /* ring_writer.cpp: std::memcpy(map.record(head_), &pad, sizeof pad) */
          ready[AT(my_head)] = COMMITTED; kind[AT(my_head)] = PADDING; units[AT(my_head)] = pad
        :: else
        fi;
        /* ring_writer.cpp: std::memcpy(map.record(slot.position), &header, sizeof header) */
        ready[AT(at)] = PENDING; kind[AT(at)] = ROWS; units[AT(at)] = n; seq[AT(at)] = s;
        my_head = at + n;
        pad = 0
      }
      d_step { head = my_head; published[s] = true } /* ring_writer.cpp: store_release(&ring->head, head_ = end) */
      if
      :: d_step { nfull(copies) -> copies!at, n, s } /* copier.cpp: cuStreamWriteValue32 */
      :: true -> fill(at, n, s)
      fi;
      d_step { s++; n = 0; at = 0 }
    :: !n -> break
    od;

    over = true;
    d_step { my_tail = tail; at = my_tail }
    do
    :: d_step {
         at != my_head -> /* ring_writer.cpp: for (uint64_t at = acquire_tail(); at != head_;) */
         if :: ready[AT(at)] == PENDING -> ready[AT(at)] = ABANDONED :: else fi; /* ring_writer.cpp: __atomic_compare_exchange_n */
         at = at + units[AT(at)]
       }
    :: at == my_head -> break
    od;
    if
    :: my_tail == my_head -> d_step { all_seen(); named = false } /* ring_writer.cpp: unlinked_ = tail_ == head_ && file_->unlink() */
    :: else
    fi;
    producer = false /* ring_writer.cpp: file_->lock.close() */
  } unless {
    d_step { !producer; my_head = 0; my_tail = 0; s = 0; n = 0; pad = 0; at = 0; i = 0 }
  }
}

/* It may go on after its process is gone. */
active proctype Gpu() {
  byte at, n, s;
  do
  :: copies?at, n, s -> fill(at, n, s); d_step { at = 0; n = 0; s = 0 }
  od
}

/* A lease is given back; the tail moves over all that were, the oldest first. */
inline give_back(which) {
  d_step {
    back[which] = true; /* ring_reader.cpp: extents_[ticket - first_ticket_].released = true */
    do
#ifdef BREAK_LEASES
    :: back[0] || back[1] ->
#else
    :: back[0] -> /* ring_reader.cpp: while (!extents_.empty() && extents_.front().released) */
#endif
      my_tail = ends[0];
      first[0] = first[1]; ends[0] = ends[1]; was[0] = was[1]; back[0] = back[1];
      first[1] = 0; ends[1] = 0; was[1] = 0; back[1] = false;
      held--
    :: else -> break
    od;
    do
    :: tail != my_tail -> owner[AT(tail)] = NONE; tail++ /* ring_reader.cpp: store_release(&file_->map->header()->tail, tail_) */
    :: else -> break
    od
  }
}

inline lease() {
  first[held] = cursor; cursor = cursor + n; ends[held] = cursor; was[held] = r; held++;
  next = s + 1 /* ring_reader.cpp: next_seq_ = record->header.seq + 1 */
}

/* The last read of a record: nobody has overwritten it. */
inline read_record(at, end, outcome) {
  assert(owner[AT(at)] == s);
  assert(outcome != COMMITTED || end - at == 1 || body[AT(at + 1)] == s);
  seen[s] = true
}

#define LOOK \
  r = ready[AT(cursor)]; n = units[AT(cursor)]; s = seq[AT(cursor)]; k = kind[AT(cursor)]

#define HEADER n = first[j]; k = ends[j]; r = was[j]; s = seq[AT(n)]
#ifdef BREAK_FREE
#define TAKE HEADER
#define GIVE give_back(j); read_record(n, k, r)
#else
#define TAKE HEADER; read_record(n, k, r)
#define GIVE give_back(j)
#endif

proctype Consumer(byte me) {
  byte my_tail, cursor, next = NONE, r, n, s, k, i, j, held;
  byte first[2], ends[2], was[2]; /* leases, oldest first */
  bool back[2];

  {
#ifdef BREAK_ATTACH
    my_tail = tail;
#endif
    d_step { named && consumer == NONE -> consumer = me } /* ring_reader.cpp: file_->lock.try_lock(Role::kConsumer) */
#ifndef BREAK_ATTACH
    my_tail = tail; /* ring_reader.cpp: tail_ = cursor_ = load_acquire(&file_->map->header()->tail) */
#endif
    cursor = my_tail;

    do
    :: held < 2 && head != cursor -> /* ring_reader.cpp: const uint64_t head = load_acquire(&file_->map->header()->head) */
      d_step {
        LOOK; /* ring_check.cpp: load_acquire(&map.record(position)->ready) */
        if
        :: k == PADDING -> assert(n == CAP - AT(cursor)); cursor = cursor + n; LOOK /* ring_reader.cpp: cursor_ = record.end() */
        :: else
        fi;
        /* The next one: none twice by one owner, none left out. */
        assert(k == ROWS && owner[AT(cursor)] == s && (next == NONE || s == next));
        k = 0;
        if
        :: r != PENDING -> lease() /* ring_reader.cpp: return Lease{*record, lease_to(record->end())} */
        :: else -> k = 1
        fi
      }
      if
      :: d_step { !k -> r = 0; n = 0; s = 0 }
      :: d_step { k && ready[AT(cursor)] != PENDING -> r = 0; n = 0; s = 0; k = 0 }
#ifdef BREAK_SKIP
      :: k ->
#else
      :: k && !producer -> /* ring_reader.cpp: check(!producer_alive(), Fault::kBusy */
#endif
        if
#ifdef BREAK_PROBE
        :: d_step {
             true ->
#else
        :: ready[AT(cursor)] != PENDING /* ring_reader.cpp: if (!record || record->header.ready != kPending) return std::nullopt */
        :: d_step {
             ready[AT(cursor)] == PENDING ->
#endif
             /* What the GPU commits after this is lost, and is named. */
             assert(ready[AT(cursor)] == PENDING && !producer);
             torn[s] = true;
             j = held;
             lease()
           }
           give_back(j) /* ring_reader.cpp: release_locked(lease_to(record->end())) */
        fi;
        r = 0; d_step { n = 0; s = 0; j = 0; k = 0 }
      fi

    /* In any order. */ /* ring_reader.cpp: void RingReader::release(uint64_t ticket */
    :: d_step { held -> j = 0; TAKE }
      GIVE;
      d_step { r = 0; n = 0; s = 0; k = 0; j = 0 }
    :: d_step { held > 1 && !back[1] -> j = 1; TAKE }
      GIVE;
      d_step { r = 0; n = 0; s = 0; k = 0; j = 0 }

    :: !held && my_tail == head -> /* ring_reader.cpp: if (tail_ != acquire_head() || !file_->lock.try_lock(Role::kProducer)) return false */
      if
      :: !producer ->
        if
#ifndef BREAK_UNLINK
        :: my_tail != head /* ring_reader.cpp: const bool unlinked = tail_ == acquire_head() && file_->unlink() */
        :: d_step { my_tail == head -> all_seen(); named = false } break
#else
        :: d_step { all_seen(); named = false } break
#endif
        fi
      :: head != my_tail
      fi
    od;
    consumer = NONE; /* ring_reader.cpp: file_->lock.close() */
    killed[me] = true
  } unless {
    d_step {
      killed[me];
      my_tail = 0; cursor = 0; next = 0; r = 0; n = 0; s = 0; k = 0; i = 0; j = 0; held = 0;
      first[0] = 0; first[1] = 0; ends[0] = 0; ends[1] = 0; was[0] = 0; was[1] = 0;
      back[0] = false; back[1] = false
    }
  }
}

/* The kernel gives the locks of the dead back. A kill that comes last is none. */
active proctype ProducerKiller() {
  producer = false
}

active proctype ConsumerKiller() {
  d_step { killed[0] = true; if :: consumer == 0 -> consumer = NONE :: else fi }
}

/* When nobody can go on, the ring is drained and has no name, and no hand had to help. */
active proctype Onlooker() {
  byte i;
  timeout -> assert(!named); all_seen()
}

init { atomic { run Consumer(0); run Consumer(1) } }
